"""Serves a mixture of experts with ``transformers serve``, whose requests are those of OpenAI's API.

    pip install 'transformers[serving]'
    python examples/downstream/serve_mixture.py runs/exported/MHe-IHo --port 8000

``export_mixture.py`` writes the folder. This command runs its code, so read ``mixture_model.py`` in it first. All
options of ``transformers serve`` can follow except ``--continuous-batching``: a mixture has no paged attention.
"""

import sys
from pathlib import Path

import transformers
from transformers.cli.transformers import main
from transformers.dynamic_module_utils import get_class_from_dynamic_module


def serve(folder: str) -> None:
    """Shows the server the class of a mixture: it looks for classes of models in transformers alone."""
    name = "MixtureForCausalLM"
    setattr(transformers, name, get_class_from_dynamic_module(f"mixture_model.{name}", folder))
    sys.argv[1:1] = ["serve", "--trust-remote-code"]
    main()


if __name__ == "__main__":
    if len(sys.argv) == 1 or not Path(sys.argv[1], "mixture_model.py").is_file():
        sys.exit("Usage: serve_mixture.py FOLDER [OPTIONS of transformers serve]; export_mixture.py writes the folder.")
    serve(sys.argv[1])
