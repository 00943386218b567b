"""What a Lightning user sees, without any logging configured: the truth, once."""

import re
import signal
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
from harness import digest
from lightning.pytorch.callbacks import ModelCheckpoint
from support.stored import newest_directory
from test_callback import DieAt, Plain, Ready, fit, loaders, make_trainer, raising

from lazysnap import LazySnapshotCallback, PersistentLevel, SnapshotConfig, load_weights
from lazysnap.errors import ConfigError

SCRIPT = Path(__file__).parent / "visible_fit.py"


@pytest.fixture
def start(zygote, tmp_path):
    """Run the script in this directory; its status, the lines that name lazysnap, and all that it said."""

    def run(*arguments):
        status = zygote.run([str(SCRIPT), str(tmp_path), *map(str, arguments)], {}, tmp_path / "output")
        text = (tmp_path / "output").read_text()
        lines = [line for line in text.splitlines() if "lazysnap" in line and not line.startswith("statistics")]
        return status, lines, text

    return run


def test_a_killed_fit_tells_where_it_goes_on_and_lightning_says_nothing_false(start, tmp_path):
    """Ten batches an epoch: killed before step 14 is trained, so step 13 or 14 is the newest, in epoch 1."""
    level = tmp_path / "lazysnap"
    code, lines, _ = start(13)
    assert code == -signal.SIGKILL
    assert lines[0] == f"lazysnap: starting fresh: there is no snapshot in memory or at {level}"
    assert [line.split(" ")[1] for line in lines[1:]] == ["state"]

    code, lines, text = start(-1)

    assert code == 0, text
    resumed, state, summary, loaded = lines
    assert re.fullmatch(rf"lazysnap: state .+ available; stored at {level} every 10 steps", state)
    found = re.fullmatch(
        r"lazysnap: resumed step (\d+) of run \w{4,16} \(epoch 1, batch (\d+)\) from memory: captured [\d.]+ m?s "
        r"before the end, lost (1 step and )?at most the (?:step|one) that was running; restored in [\d.]+ m?s",
        resumed,
    )
    assert found is not None, resumed
    lost = 0 if found[3] is None else 1
    step = int(found[1])
    batch = int(found[2])
    assert (step, batch) == (13 - lost, 3 - lost)
    count = 20 - step
    assert re.fullmatch(
        rf"lazysnap: captured {count} of {count} due steps \(.* each\); stored \d at {level} \(newest: step 20\); "
        r"training waited [\d.]+ m?s in all",
        summary,
    )
    assert re.fullmatch(
        rf"lazysnap: loaded the weights of step 20 of run \w+ from {level}: captured .* ago; read in .* m?s", loaded
    )
    assert "Restored all states" not in text
    assert "at latest" not in text
    assert "not resumable" not in text
    assert f"statistics {count} {{'{level}': 20}}" in text
    assert "afterwards True" in text


def test_a_fit_that_does_not_ask_for_latest_says_so(start, tmp_path):
    _, lines, text = start(-1, "none")
    assert lines[0].startswith("lazysnap: starting fresh: no restart was asked for; trainer.fit(..., ckpt_path="), text
    _, lines, text = start(-1, tmp_path / "whole.ckpt")
    assert "Restored all states from the checkpoint at" in text  # Lightning's own line about Lightning's own file
    assert not [line for line in lines if "starting fresh" in line]


def shown_warnings(directory, **settings):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fit(directory, **settings)
    return [str(item.message) for item in found if "not resumable" in str(item.message)]


def test_lightnings_warning_is_silenced_for_a_snapshot_and_stays_for_its_own_checkpoint(tmp_path):
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, DieAt(3, raising(ZeroDivisionError())))
    assert shown_warnings(tmp_path) == []

    checkpoint = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=3, save_top_k=-1)
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path / "other", checkpoint, DieAt(4, raising(ZeroDivisionError())), enable_checkpointing=True)
    (path,) = (tmp_path / "ckpt").glob("*.ckpt")
    assert len(shown_warnings(tmp_path / "third", ckpt_path=str(path))) == 1


def test_persist_every_n_steps_is_what_storage_gets_and_every_n_steps_what_memory_gets(tmp_path):
    pl.seed_everything(1, verbose=False)
    lazy = LazySnapshotCallback(tmp_path / "here", every_n_steps=2, persist_every_n_steps=4)
    assert lazy.statistics() is None
    seen = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            seen.append(lazy.statistics().began)

        def on_train_start(self, trainer, *_):
            config = lazy.engine._config
            assert (config.every_n_steps, [level.every_n_steps for level in config.levels]) == (2, [4])

    make_trainer(tmp_path, lazy, Ready(lazy), Look()).fit(Plain(), *loaders())
    assert seen[-1] > 0
    statistics = lazy.statistics()
    assert statistics.began == 7  # 1, 3, 5, 7, 9, 11 and the last one
    assert statistics.last_durable_step == {str(tmp_path / "here"): 12}
    assert statistics.waited_s > 0


def test_persist_every_n_steps_that_contradicts_the_config_is_refused(tmp_path):
    config = SnapshotConfig(levels=(PersistentLevel(tmp_path, every_n_steps=50),))
    LazySnapshotCallback(persist_every_n_steps=50, config=config)
    LazySnapshotCallback(config=config)
    for given in (40, 100):  # the second is what it would be without a config
        with pytest.raises(ConfigError, match=rf"persist_every_n_steps={given} contradicts .* \[50\]"):
            LazySnapshotCallback(persist_every_n_steps=given, config=config)
    with pytest.raises(ConfigError, match=r"every_n_steps=1 contradicts config\.every_n_steps=5"):
        LazySnapshotCallback(every_n_steps=1, config=SnapshotConfig(every_n_steps=5))
    with pytest.raises(ConfigError, match="persist_every_n_steps must be an integer >= 1 or None, got 0"):
        LazySnapshotCallback(persist_every_n_steps=0)


def test_the_directory_of_a_snapshot_as_ckpt_path_is_refused_with_what_to_do_instead(tmp_path):
    fit(tmp_path, max_epochs=1)
    path = newest_directory(tmp_path / "lazysnap")
    with pytest.raises(ConfigError, match=r'not a checkpoint file of Lightning: ckpt_path="latest" resumes'):
        fit(tmp_path, ckpt_path=path)
    with pytest.raises(ConfigError, match=r"load_weights"):
        make_trainer(tmp_path, LazySnapshotCallback()).validate(Plain(), loaders()[1], ckpt_path=path)


def test_load_weights_gives_the_modules_state_dict(tmp_path):
    _, model = fit(tmp_path, max_epochs=1)
    state = load_weights(tmp_path / "lazysnap")
    assert digest(state) == digest(dict(model.state_dict()))
    other = Plain()
    other.load_state_dict(state)
    assert digest(other.state_dict()) == digest(model.state_dict())
