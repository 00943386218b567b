"""``--format huggingface``: the folder that ``save_pretrained`` writes, which ``from_pretrained`` loads."""

import json
from pathlib import Path

import pytest
import torch
from ranks import engine_for, flat
from safetensors.torch import load_file
from support.saving import put
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import lazysnap
from lazysnap.cli import main
from lazysnap.exports import huggingface
from lazysnap.exports.exporting import write
from lazysnap.exports.job import ExportJob
from lazysnap.levels.store import open_storage
from lazysnap.snapshots.catalogue import Catalogue

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("huggingface export"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]
SIZES = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}


def gpt2():
    torch.manual_seed(1)
    return GPT2LMHeadModel(GPT2Config(vocab_size=33, bos_token_id=1, eos_token_id=2, **SIZES))


def run(*arguments) -> int:
    return main([str(argument) for argument in arguments])


def run_json(capsys, *arguments) -> tuple[int, dict]:
    """Exit code and the one JSON object on stdout."""
    capsys.readouterr()
    code = run(*arguments, "--json")
    return code, json.loads(capsys.readouterr().out)


def tensors(folder: Path) -> dict:
    return flat({k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()})


def texts(folder: Path) -> dict:
    return {path.name: json.loads(path.read_text()) for path in folder.glob("*config.json")}


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """A plain loop's snapshot of a GPT-2, and the folder that it saved itself at that step."""
    root = tmp_path_factory.mktemp("gpt2")
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with engine_for(str(root / "level"), model=model, optimizer=optimizer) as engine:
        tokens = torch.randint(0, 33, (2, 8))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        assert engine.boundary(1)
        engine.gate()
        model.save_pretrained(root / "stock")
    return str(root / "level"), root / "stock"


def test_a_folder_is_as_save_pretrained_writes_it(captured, tmp_path, capsys):
    url, stock = captured
    folder = tmp_path / "model"
    code, result = run_json(capsys, "export", url, "latest", "--to", folder, "--format", "huggingface")
    assert code == 0
    assert result["notes"] == ["no tokenizer files: `lazysnap export --config DIR` copies those of a directory"]

    assert tensors(folder) == tensors(stock)
    assert texts(folder) == texts(stock)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    expected = AutoModelForCausalLM.from_pretrained(stock)
    assert flat(dict(loaded.state_dict())) == flat(dict(expected.state_dict()))
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


def test_large_weights_are_in_several_files_with_an_index(captured, tmp_path, monkeypatch):
    url, stock = captured
    folder = tmp_path / "model"
    catalogue = Catalogue(open_storage(url))
    with monkeypatch.context() as patches:
        patches.setattr(huggingface, "SHARD_BYTES", 5000)
        write(catalogue, catalogue.find("latest"), ExportJob(path=str(folder), format="huggingface"))

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    names = {path.name for path in folder.glob("*.safetensors")}
    assert set(index["weight_map"].values()) == names
    assert f"model-00001-of-{len(names):05d}.safetensors" in names
    assert tensors(folder) == tensors(stock)
    assert all(load_file(folder / file).keys() >= {name} for name, file in index["weight_map"].items())
    assert flat(dict(GPT2LMHeadModel.from_pretrained(folder).state_dict())) == flat(
        dict(GPT2LMHeadModel.from_pretrained(stock).state_dict())
    )


@pytest.mark.slow
def test_a_directory_gives_config_and_tokenizer_where_the_snapshot_has_none(captured, tmp_path, capsys):
    url, stock = str(tmp_path / "level"), captured[1]
    model = gpt2()
    put(url, 10, {"net": {"inner": dict(model.state_dict())}})
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_bytes((stock / "config.json").read_bytes())
    (base / "tokenizer.json").write_text('{"version": "1.0"}')
    (base / "model.safetensors").write_text("not these weights")
    (base / "notes.txt").write_text("mine")
    folder, words = tmp_path / "model", ("--format", "huggingface", "--only", "net.inner")

    code, result = run_json(capsys, "export", url, "10", "--to", folder, *words)
    assert code == 2
    assert "no config.json" in result["error"]
    assert "--config DIR" in result["error"]
    assert not folder.exists()

    assert run("export", url, "10", "--to", folder, *words, "--config", base) == 0
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "tokenizer.json", "model.safetensors",
    }  # fmt: skip
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert flat(dict(loaded.state_dict())) == flat(dict(model.state_dict()))
    words = ("--to", tmp_path / "other", "--format", "huggingface", "--config", tmp_path / "none")
    code, result = run_json(capsys, "export", url, "10", *words)
    assert code == 2
    assert "no such directory" in result["error"]


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        tokens = torch.arange(8) + index
        return {"input_ids": tokens, "labels": tokens}


@pytest.mark.slow
def test_the_trainer_notes_what_a_folder_needs(tmp_path):
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=2, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
    )
    trainer = Trainer(model=gpt2(), args=arguments, train_dataset=Texts())
    lazysnap.attach(trainer, tmp_path / "level")
    trainer.train()
    trainer.save_model(str(tmp_path / "stock"))

    lazysnap.export(tmp_path / "level", tmp_path / "model", format="huggingface")

    assert tensors(tmp_path / "model") == tensors(tmp_path / "stock")
    assert texts(tmp_path / "model") == texts(tmp_path / "stock")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "lora"])
def test_of_two_ranks_it_is_the_folder_that_the_library_saves(worlds, tmp_path, kind):
    url, stock, folder = str(tmp_path / "level"), tmp_path / "stock", tmp_path / "model"
    worlds.run(2, "save_pretrained", url=url, kind=kind, reference=str(stock))

    lazysnap.export(url, folder, format="huggingface")

    expected = tensors(stock)
    if kind == "fsdp":
        del expected["lm_head.weight."]  # gathered, tied tensors are two
    assert tensors(folder) == expected
    assert texts(folder) == texts(stock)
    if kind == "lora":
        from peft import PeftModel

        assert (folder / "adapter_model.safetensors").exists()
        ours, theirs = (dict(PeftModel.from_pretrained(gpt2(), at).state_dict()) for at in (folder, stock))
        assert flat(ours) == flat(theirs)
    else:
        ours, theirs = (dict(AutoModelForCausalLM.from_pretrained(at).state_dict()) for at in (folder, stock))
        assert flat(ours) == flat(theirs)


def test_what_a_snapshot_claims_of_a_model_is_not_believed(tmp_path, capsys):
    url = str(tmp_path / "level")
    weights = {"w": torch.ones(3)}
    claims = [
        '{"model": {"files": {"../../evil.json": "x"}}}',
        '{"model": {"files": {"evil.py": "import os"}}}',
        '{"model": {"files": [1]}}',
        '{"model": {"files": {"adapter_config.json": "{}"}, "weights": {"w": "none"}}}',
        "[" * 100,
    ]
    for step, claim in enumerate(claims):
        put(url, step, {"model": weights, "lazysnap": {"optimizers": {}, "pretrained": claim}})
        code, result = run_json(capsys, "export", url, str(step), "--to", tmp_path / "model", "--format", "huggingface")
        assert code in (1, 2), claim
        assert "not foreseen" not in result["error"]
        assert not (tmp_path / "model").exists()
    assert not (tmp_path.parent / "evil.json").exists()
