"""Settings that cannot work are refused when they are made, with one clear message."""

import os
from dataclasses import FrozenInstanceError

import pytest

from lazysnap import (
    LazySnapError,
    MemoryLevel,
    PersistentLevel,
    Redundancy,
    SnapshotConfig,
)
from lazysnap.config import redundancy_for, too_few_nodes
from lazysnap.errors import ConfigError
from lazysnap.levels.store import open_storage

BAD_LEVELS = [
    ({"url": ""}, "url"),
    ({"url": None}, "url"),
    ({"url": 7}, "url"),
    ({"url": "x", "every_n_steps": 0}, "every_n_steps"),
    ({"url": "x", "every_n_steps": 2.5}, "every_n_steps"),
    ({"url": "x", "every_n_steps": True}, "every_n_steps"),
    ({"url": "x", "every_s": 0}, "every_s"),
    ({"url": "x", "every_s": -1.0}, "every_s"),
    ({"url": "x", "every_s": "60"}, "every_s"),
    ({"url": "x", "every_s": 5.0, "every_n_steps": 10}, "every_s=5.0 and every_n_steps=10 contradict"),
    ({"url": "x", "keep_last": 0}, "keep_last"),
    ({"url": "x", "keep_last": "2"}, "keep_last"),
    ({"url": "x", "keep_every_n_steps": 0}, "keep_every_n_steps"),
    ({"url": "x", "keep_every_n_steps": -5}, "keep_every_n_steps"),
]
BAD_MEMORY = [
    ({"linger_s": -1}, "linger_s"),
    ({"linger_s": float("inf")}, "linger_s"),
    ({"linger_s": float("nan")}, "linger_s"),
    ({"linger_s": "30"}, "linger_s"),
    ({"linger_s": True}, "linger_s"),
    ({"max_bytes": 0}, "max_bytes"),
    ({"max_bytes": 1e9}, "max_bytes"),
    ({"spill_dir": 7}, "spill_dir"),
]
BAD_CONFIGS = [
    ({"every_n_steps": 0}, "every_n_steps"),
    ({"every_n_steps": "auto"}, "every_n_steps"),
    ({"levels": PersistentLevel("x")}, "must be a tuple"),
    ({"levels": "x"}, "must be a tuple"),
    ({"levels": None}, "must be a tuple"),
    ({"levels": ("x",)}, "levels"),
    ({"levels": (PersistentLevel("x"), PersistentLevel("./x"))}, "twice"),
    ({"memory": None}, "memory"),
    ({"memory": 3}, "memory"),
    ({"require_memory": "memory"}, "require_memory"),
    ({"redundancy": "xor"}, "redundancy"),
    ({"redundancy": Redundancy}, "redundancy"),
    ({"redundancy": 2}, "redundancy"),
    ({"job_id": ""}, "job_id"),
    ({"job_id": "  "}, "job_id"),
    ({"job_id": 5}, "job_id"),
    ({"io_timeout_s": -1}, "io_timeout_s"),
    ({"io_timeout_s": None}, "io_timeout_s"),
    ({"collective_timeout_s": float("nan")}, "collective_timeout_s"),
    ({"drain_timeout_s": "600"}, "drain_timeout_s"),
    ({"preemption_timeout_s": -1}, "preemption_timeout_s"),
]
BAD_REDUNDANCIES = [
    (Redundancy, {"every_n_steps": 0}, "every_n_steps"),
    (Redundancy, {"group_size": 1}, "group_size"),
    (Redundancy, {"group_size": 129}, "group_size"),
    (Redundancy, {"group_size": 4.0}, "group_size"),
    (Redundancy, {"parity": 0}, "parity"),
    (Redundancy, {"parity": True}, "parity"),
    (Redundancy, {"parity": 8}, "parity"),
    (Redundancy, {"max_bytes_per_s": 0}, "max_bytes_per_s"),
]
BAD = [(kind, *case) for kind, cases in ((PersistentLevel, BAD_LEVELS), (MemoryLevel, BAD_MEMORY)) for case in cases]
BAD += [(SnapshotConfig, *case) for case in BAD_CONFIGS]
BAD += BAD_REDUNDANCIES


@pytest.mark.parametrize(("kind", "settings", "word"), BAD, ids=lambda value: str(value)[:60])
def test_a_bad_setting_is_one_clear_error_that_names_it_and_what_was_given(kind, settings, word):
    with pytest.raises(ConfigError) as caught:
        kind(**settings)

    text = str(caught.value)
    assert word in text
    assert kind.__name__ in text
    assert "\n" not in text
    assert isinstance(caught.value, LazySnapError)
    assert isinstance(caught.value, ValueError)


CREDENTIALS = [
    "s3://me:hidden@bucket/run",
    "s3://me:hid/hidden@bucket/run",
    "s3://hidden@bucket/run",
    "sftp://me:hidden@host/run",
    "sftp://me:hid@hidden@host/run",
    "simplecache::sftp://me:hidden@host/run",
    "https://host/run?sv=1&sig=hidden%3D",
    "https://hidden@host/run",
    "s3://bucket/run?token=hidden",
    "https://host/run?X-Amz-Signature=hidden&access_token=hidden#x",
    "s3://me:hidden@bucket/not-utf-8-\udcff",
    "sftp://me:hidden@host/not-utf-8-\udcff",
]


@pytest.mark.parametrize("url", CREDENTIALS)
@pytest.mark.parametrize("use", [PersistentLevel, open_storage], ids=lambda value: value.__name__)
def test_credentials_in_a_url_are_refused_in_one_line_that_says_where_they_belong(use, url):
    with pytest.raises(ConfigError, match="storage_options") as caught:
        use(url)

    text = str(caught.value)
    assert f"{url.partition('://')[0].rpartition('::')[2]}://… holds" in text
    assert "hid" not in text
    assert len(text) < 300


@pytest.mark.parametrize("levels", ["s3://me:hidden@bucket", ("s3://me:hidden@bucket",)])
def test_a_url_in_place_of_a_level_is_refused_without_showing_what_it_holds(levels):
    with pytest.raises(ConfigError, match="levels must") as caught:
        SnapshotConfig(levels=levels)

    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("url", ["sftp://me:hidden@ho℀st/run", "sftp://me:hidden@[host/run"])
@pytest.mark.parametrize("use", [PersistentLevel, open_storage], ids=lambda value: value.__name__)
def test_a_url_with_an_impossible_host_is_refused_without_showing_what_it_holds(use, url):
    with pytest.raises(ConfigError, match=r"^the URL sftp://… has a host that is none") as caught:
        use(url)

    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["s3://bucket/a@b:c", "s3://arn:aws:s3:eu-1:12:accesspoint/mine/run@5", "sftp://me@host/run"]
)
def test_keys_of_s3_and_names_of_users_are_no_credentials(url):
    assert PersistentLevel(url).url == url


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (SnapshotConfig, "every_step"),
        (MemoryLevel, "linger"),
        (Redundancy, "parities"),
    ],
)
def test_a_misspelt_setting_is_refused(kind, name):
    with pytest.raises(TypeError, match=name):
        kind(**{name: 1})


def test_settings_do_not_change_after_they_were_checked():
    config = SnapshotConfig(levels=[PersistentLevel("x")])
    assert config.levels == (PersistentLevel("x"),)
    with pytest.raises(FrozenInstanceError):
        config.every_n_steps = 0


def test_all_but_the_url_is_keyword_only():
    with pytest.raises(TypeError):
        PersistentLevel("x", 5)
    with pytest.raises(TypeError):
        SnapshotConfig(5)


@pytest.mark.parametrize(
    ("level", "period_s"),
    [
        (PersistentLevel("/runs/a"), 60.0),
        (PersistentLevel("file:///runs/a"), 60.0),
        (PersistentLevel("s3://bucket/run"), 300.0),
        (PersistentLevel("s3://bucket/run", every_s=7), 7),
        (PersistentLevel("/runs/a", every_n_steps=100), None),
    ],
)
def test_a_level_stores_by_time_unless_it_is_given_steps(level, period_s):
    assert level.period_s == period_s


def test_a_local_level_names_one_place_whatever_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    places = {PersistentLevel(url).url for url in ("real", "./real/", "link", f"file://{tmp_path}/real")}
    assert places == {os.path.realpath(tmp_path / "real")}


@pytest.mark.parametrize("url", ["s3://bucket/run", "memory://run", "gs://bucket/a/b"])
def test_other_urls_are_kept_as_they_are(url):
    assert PersistentLevel(f"{url}/").url == url


def test_a_level_in_some_process_memory_is_refused():
    with pytest.raises(ConfigError, match="memory://run would die with the process that writes it"):
        SnapshotConfig(levels=(PersistentLevel("memory://run"),))


def test_every_setting_says_what_it_is_in_the_source():
    """A docstring stands under each field: what users read instead of a reference page."""
    import ast
    import inspect

    import lazysnap.config

    for node in ast.parse(inspect.getsource(lazysnap.config)).body:
        if isinstance(node, ast.ClassDef):
            for field, after in zip(node.body, [*node.body[1:], None], strict=True):
                if isinstance(field, ast.AnnAssign):
                    documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                    assert documented, f"{node.name}.{field.target.id} has no docstring"


def test_an_unknown_setting_is_refused_by_name():
    with pytest.raises(TypeError, match="unexpected keyword argument 'averaging_period'"):
        SnapshotConfig(averaging_period=4)


def test_a_url_of_a_kind_that_fsspec_does_not_know_is_refused():
    for url in ("foo://x/run", "simplecache::foo://x"):
        with pytest.raises(ConfigError, match="fsspec knows no foo://"):
            PersistentLevel(url)
    for url in ("s3://b/run", "gs://b/run", "simplecache::gs://b", "sftp://me@host/run", "a:b/c"):
        assert PersistentLevel(url).url == url


@pytest.mark.parametrize(
    ("asked", "nodes", "given"),
    [
        ("auto", 1, None),
        ("auto", 2, Redundancy(parity=1)),
        ("auto", 3, Redundancy(parity=1)),
        ("auto", 4, Redundancy(parity=2)),
        ("auto", 2048, Redundancy(parity=2)),
        (None, 8, None),
        (Redundancy(), 1, None),
        (Redundancy(group_size=4), 2, Redundancy(group_size=4)),
        (Redundancy(parity=3, group_size=6), 4, Redundancy(parity=3, group_size=6)),
    ],
)
def test_redundancy_is_chosen_by_the_number_of_nodes_or_as_it_was_asked(asked, nodes, given):
    config = SnapshotConfig(redundancy=asked)
    assert redundancy_for(config, nodes) == given
    assert too_few_nodes(config, nodes) is None


def test_with_too_few_nodes_parity_is_as_large_as_leaves_a_piece_of_data():
    config = SnapshotConfig(redundancy=Redundancy(parity=3, every_n_steps=5))
    for nodes in (2, 3):
        assert redundancy_for(config, nodes) == Redundancy(parity=nodes - 1, every_n_steps=5)
        assert f"Redundancy(parity=3), and there are {nodes} nodes" in too_few_nodes(config, nodes)


def test_a_configuration_file_sets_redundancy():
    """LightningCLI reads settings by their annotations."""
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(SnapshotConfig, "config")
    instantiate = getattr(parser, "instantiate", parser.instantiate_classes)  # the second is the older name

    def read(written):
        return instantiate(parser.parse_args([f"--config.redundancy={written}"])).config.redundancy

    assert read("auto") == "auto"
    assert read("null") is None
    assert read('{"parity": 2, "every_n_steps": 5}') == Redundancy(parity=2, every_n_steps=5)


def test_settings_can_be_compared_and_are_keys_of_a_dict():
    def config(secret):
        level = PersistentLevel("s3://bucket/run", storage_options={"key": "me", "secret": secret})
        return SnapshotConfig(levels=(level,))

    assert config("a") == config("a")
    assert config("a") != config("b")
    assert hash(config("a")) == hash(config("a"))
    assert len({config("a"): 1, config("a"): 2, config("b"): 3}) == 2


def test_places_are_paths_or_text_and_are_kept_as_text(tmp_path):
    level = PersistentLevel(tmp_path)
    memory = MemoryLevel(spill_dir=tmp_path)

    assert level == PersistentLevel(str(tmp_path))
    assert level.url == str(tmp_path)
    assert memory.spill_dir == str(tmp_path)
