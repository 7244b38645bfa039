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
root_doc = "docs/index"
include_patterns = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/*.md", "examples/README.md", "study/tables.md"]
# Sphinx searches every folder that is not excluded, and follows links.
exclude_patterns = [".git", ".venv", "runs"]
# For contributors, lawyers and doubters: other pages link them, and the side bar leaves them out.
_NOT_IN_SIDE_BAR = ("CONTRIBUTING", "SECURITY", "docs/architecture", "docs/patents", "study/tables")

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


def setup(app: Sphinx) -> None:
    """Registers what this site does on its own; Sphinx calls it."""
    app.connect("env-updated", _leave_out)
