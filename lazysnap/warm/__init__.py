"""Warm restarts: a parent that has imported the modules of the program forks each start of it.

``supervisor`` starts a command again after a crash. ``client`` is the process of one start: it gives the parent
everything that a fork does not inherit, forwards signals and ends as the program ends. ``parent/sitecustomize.py`` is
the parent. Standard library only.
"""
