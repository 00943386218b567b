"""Values of unknown types in what a program adds to the state are left out, and put back from the program's own."""

import argparse
import enum
import pathlib
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from lazysnap.state.skipped import SkippedValues, with_values_of
from lazysnap.state.walk import walk


class Colour(enum.Enum):
    RED = 1


@dataclass
class Point:
    x: int
    y: int


class Config(dict):
    """A dict of a class of its own, as packages for settings have it."""


def without(value, **settings):
    skipped = SkippedValues(**settings)
    return skipped.without(value), [*skipped.kinds]


def test_what_is_known_stays_the_same_object():
    state = {"a": [1, (2.0, None)], "b": OrderedDict(c=torch.ones(2)), "d": np.ones(3), "e": {1, 2}}

    kept, paths = without(state)

    assert kept is state
    assert paths == []


@pytest.mark.parametrize(
    "value", [object(), print, Colour.RED, Point(1, 2), Config(a=1), np.array([object()]), {object()}]
)
def test_an_unknown_value_is_left_out_of_dicts_and_is_none_in_lists(value):
    state = {"a": value, "b": [1, value], "c": OrderedDict(d=(value, 2)), "e": 5}

    kept, paths = without(state)

    assert kept == {"b": [1, None], "c": OrderedDict(d=(None, 2)), "e": 5}
    assert paths == [("a",), ("b", 1), ("c", "d", 0)]
    walk(kept)  # a snapshot can hold it
    assert state["b"][1] is value


def test_a_value_that_contains_itself_is_left_out():
    """Also where many ways lead back, as from the nodes of a tree to their parents."""
    tree = {"name": "root"}
    tree["children"] = [{"parent": tree, "root": tree, "name": number} for number in range(3)]

    kept, paths = without({"tree": tree, "after": 1})

    assert kept == {"tree": {"name": "root", "children": [{"name": 0}, {"name": 1}, {"name": 2}]}, "after": 1}
    assert len(paths) == 6
    walk(kept)


def test_what_is_nested_too_deep_is_left_out():
    deep = []
    for _ in range(200):
        deep = [deep]

    kept, paths = without({"deep": deep, "after": 1})

    assert kept["after"] == 1
    assert len(paths) == 1
    walk(kept)


def test_a_key_of_an_unknown_type_is_left_out():
    kept, paths = without({"a": {Colour.RED: 1, "b": 2}})

    assert kept == {"a": {"b": 2}}
    assert paths == [("a", repr(Colour.RED))]


def test_a_restart_puts_the_programs_own_values_in_the_same_places():
    value = Point(3, 4)
    kept, paths = without({"a": {"b": Point(1, 2), "n": 7}, "c": [1, (Point(1, 2), 4)], "gone": Point(0, 0)})

    state, missing = with_values_of({"a": {"b": value, "n": 9}, "c": [2, (value, 5)]}, kept, map(list, paths))

    assert state == {"a": {"b": value, "n": 7}, "c": [1, (value, 4)]}
    assert missing == [("gone",)]


def test_hyperparameters_become_plain_values_where_they_have_a_plain_form():
    hparams = {
        "path": pathlib.Path("/x"),
        "colour": Colour.RED,
        "point": Point(1, 2),
        "config": Config(colour=Colour.RED, what=print),
        "what": print,
        "n": argparse.Namespace(a=1),
    }

    kept, paths = without({"hyper_parameters": hparams}, plain_below=("hyper_parameters",))

    assert kept["hyper_parameters"] == {
        "path": pathlib.Path("/x"),
        "colour": 1,
        "point": {"x": 1, "y": 2},
        "config": {"colour": 1},
        "n": argparse.Namespace(a=1),
    }
    assert paths == [("hyper_parameters", name) for name in ("colour", "point", "config", "what")]
    live, _ = with_values_of({"hyper_parameters": hparams}, kept, paths)
    assert live["hyper_parameters"] == hparams
