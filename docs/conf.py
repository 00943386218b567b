"""The site of lazysnap: `make docs`."""

import lazysnap

project = "lazysnap"
author = "the lazysnap developers"
copyright = author
version = release = lazysnap.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"lazysnap {version}"
html_copy_source = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_class_signature = "separated"
exclude_patterns = ["_build"]
nitpicky = False
