"""The decisions of a keeper. Pure: events and the time in, actions out. ``core.Core`` is the way in."""
