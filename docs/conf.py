"""The site's configuration, for Sphinx: `make docs` builds it in build/site, warnings as errors."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
# The package of this checkout, installed or not; the notebook's process inherits the variable.
sys.path[:0] = [str(ROOT), str(DOCS)]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])

import generate  # noqa: E402

from jagged_cuda import __version__  # noqa: E402

generate.write_pages(DOCS / "generated")

project = "jagged_cuda"
author = "the authors of jagged_cuda"
release = version = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
exclude_patterns = ["generated/benchmarks.md"]  # a part of benchmarks.md
suppress_warnings = ["misc.highlighting_failure"]  # adding_an_op.md shows parts of files
nitpicky = False

# Pages and notebooks: Markdown.
myst_heading_anchors = 3
myst_links_external_new_tab = False
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 60
nb_merge_streams = True
# A profile of its own, not the user's; without the kernel's warning that it listens on ports.
profile = ROOT / "build" / "ipython" / "profile_default"
profile.mkdir(parents=True, exist_ok=True)
(profile / "ipython_kernel_config.py").write_text('c.IPKernelApp.log_level = "ERROR"\n')
os.environ["IPYTHONDIR"] = str(profile.parent)
logging.getLogger("traitlets").setLevel(logging.WARNING)

# Docstrings: Google's sections, Markdown's backticks.
default_role = "code"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autosummary_generate = False
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_maximum_signature_line_length = 80
add_module_names = False

html_theme = "furo"
html_title = f"jagged_cuda {__version__}"
html_show_sourcelink = False
html_copy_source = False
html_show_copyright = False
