"""What does a keeper decide? Pure: events and the time in, actions out. ``core.Core`` is the way in."""
