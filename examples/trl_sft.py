"""Fine-tune a tiny GPT-2 with LoRA by TRL's SFTTrainer, without a hub; kill it and start it again.

    pip install trl peft
    python examples/trl_sft.py

The base model is frozen. It is part of every snapshot, as the adapters and their optimizer are.
"""

import argparse
import logging

import torch
from datasets import Dataset
from gpt import HAMLET
from peft import LoraConfig
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import lazysnap


def make_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """One token per character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(["<end>", *sorted(set(text))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--output-dir", default="runs/trl_sft", help="snapshots on storage lie in _lazysnap/ there")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")

    torch.manual_seed(1603)
    text = HAMLET.read_text(encoding="utf-8")
    tokenizer = make_tokenizer(text)
    lines = [line for line in text.splitlines() if len(line) > 20][:2000]
    size = {"n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 2}
    config = GPT2Config(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, **size)
    options = SFTConfig(
        output_dir=args.output_dir,
        max_steps=args.max_steps,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        max_length=64,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=False,
    )
    trainer = SFTTrainer(
        model=GPT2LMHeadModel(config),
        args=options,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"text": lines}),
        peft_config=LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM"),
    )
    lazysnap.attach(trainer)
    trainer.train(resume_from_checkpoint="latest")
    print(f"finished at step {trainer.state.global_step}", flush=True)


if __name__ == "__main__":
    main()
