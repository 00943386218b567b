"""Train a tiny GPT-2 on Hamlet with the Trainer of Transformers; kill it whenever you like and start it again.

    python examples/hf_trainer.py

What lazysnap needs of a training script are the two lines marked with (*).
"""

import argparse
import logging

import torch
from gpt import HAMLET, TextWindows
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import lazysnap


class Characters(torch.utils.data.Dataset):
    """Windows of characters; the model itself compares each with the next one."""

    def __init__(self, text: str, context: int) -> None:
        self.windows = TextWindows(text, context)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        ids, _ = self.windows[item]
        return {"input_ids": ids, "labels": ids}


class PrintLoss(TrainerCallback):
    """One line per log."""

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        print(f"starting at step {state.global_step}", flush=True)

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if "loss" in logs:
            print(f"step {state.global_step} loss {logs['loss']:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-steps", type=int, default=400)
    parser.add_argument("--output-dir", default="runs/hf_trainer", help="snapshots on storage lie in _lazysnap/ there")
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")

    torch.manual_seed(1603)
    data = Characters(HAMLET.read_text(encoding="utf-8"), 64)
    size = {"n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 2}
    config = GPT2Config(vocab_size=len(data.windows.characters), bos_token_id=0, eos_token_id=0, **size)
    options = TrainingArguments(
        output_dir=args.output_dir,
        max_steps=args.max_steps,
        per_device_train_batch_size=args.batch_size,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(GPT2LMHeadModel(config), options, train_dataset=data, callbacks=[PrintLoss()])
    lazysnap.attach(trainer)  # (*)
    trainer.train(resume_from_checkpoint="latest")  # (*)
    print(f"finished at step {trainer.state.global_step}", flush=True)


if __name__ == "__main__":
    main()
