"""The decisions of a keeper. Pure: ``core.Core`` gets events and the time, and returns actions."""
