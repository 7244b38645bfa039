"""How ``make docs`` builds the site: the Markdown of this repository where it lies, and the public docstrings."""

import datetime
import logging
import warnings

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from pier_megatron.version import __version__

# Megatron, which PierOptimizer extends, says when it is imported what it does without.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
logging.disable(logging.INFO)

project = "pier_megatron"
author = "the pier_megatron authors"
version = release = __version__
project_copyright = f"{datetime.date.today().year}, {author}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
# The source directory is the repository's root, so that links are the same here and where the repository is browsed.
root_doc = "README"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/*.md",
    "study/search.md",
    "study/tables.md",
    "study/tried.md",
]
include_patterns += ["examples/README.md", "examples/downstream/README.md", "benchmarks/gpu/results.md"]
# Sphinx searches every folder that is not excluded, and follows links.
exclude_patterns = [".git", ".venv", "runs"]
# The side bar: captions, and what it calls the pages below them.
_SIDE_BAR = {
    "Start": {"Quickstart": "docs/quickstart", "Should I use it?": "docs/should-i-use-it"},
    "Guides": {
        "Megatron-LM": "docs/running",
        "Megatron-Bridge": "docs/megatron-bridge",
        "Deploy": "docs/deploy",
        "Launchers": "docs/launchers",
        "Elastic islands": "docs/islands",
        "Checkpoints": "docs/checkpoints",
        "Monitoring": "docs/monitoring",
        "Troubleshooting": "docs/troubles",
        "The paper's runs": "examples/README",
    },
    "Reference": {
        "Flags": "docs/flags",
        "Commands": "docs/commands",
        "Python API, plain PyTorch": "docs/api",
        "Support matrix and limits": "docs/status",
    },
    "Explanation": {"How it works": "docs/how-it-works", "The planner": "docs/planner"},
    "Evidence": {
        "Training quality": "docs/study",
        "Bytes against loss": "docs/frontier",
        "Performance and scale": "docs/performance",
        "Fault tests": "docs/reliability",
        "GPU results": "docs/gpu",
    },
    "Experimental": {
        "Compression inside a group": "docs/compression",
        "Layered accumulation": "docs/layered",
        "Skipped stages": "docs/skipping",
        "Experts": "docs/experts",
    },
}
# For contributors, lawyers and doubters: other pages link them, and the side bar leaves them out.
_NOT_IN_SIDE_BAR = (
    "CONTRIBUTING",
    "SECURITY",
    "docs/architecture",
    "docs/patents",
    "study/search",
    "study/tables",
    "study/tried",
)
_NOT_IN_SIDE_BAR += ("examples/downstream/README", "benchmarks/gpu/results")

# A fence that names no language is output or a diagram.
highlight_language = "none"
# Nobody pastes a diff.
copybutton_selector = "div:not(.highlight-diff) > div.highlight > pre"

# Anchors of headings, as a browser of the repository makes them.
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "description"

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
templates_path = ["templates"]
html_additional_pages = {"index": "redirect.html"}
html_title = f"pier_megatron {__version__}"


def _leave_out(_: Sphinx, environment: BuildEnvironment) -> list[str]:
    """Tells Sphinx that these pages need no place in a table of contents."""
    for page in _NOT_IN_SIDE_BAR:
        environment.metadata[page]["orphan"] = ""
    return []


def _add_side_bar(_: Sphinx, page: str, text: list[str]) -> None:
    """Gives the README, the site's first page, its tables of contents: where the repository is browsed it has none."""
    if page == root_doc:
        for caption, pages in _SIDE_BAR.items():
            entries = "\n".join(f"{title} </{path}>" for title, path in pages.items())
            text[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"


def setup(app: Sphinx) -> None:
    """Registers what this site does on its own; Sphinx calls it."""
    app.connect("source-read", _add_side_bar)
    app.connect("env-updated", _leave_out)
