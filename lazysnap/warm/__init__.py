"""Warm restarts: a parent that has imported what the program imports forks each start of it.

``supervisor`` starts a command again after a crash. ``client`` stands for one start: it hands over to a parent what a
fork does not inherit, forwards signals and ends as the program ends. ``parent/sitecustomize.py`` is the parent.
Standard library only.
"""
