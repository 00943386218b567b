"""A training without torch that resumes by itself, and what users get wrong in theirs: the options.

Its result depends on all of its state. It stores every fifth step.
"""

import argparse
import hashlib
import pathlib
import random

parser = argparse.ArgumentParser()
parser.add_argument("directory", type=pathlib.Path)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--forgets-momentum", action="store_true")
parser.add_argument("--begins-anew", action="store_true")
parser.add_argument("--refuses-to-resume", action="store_true")
parser.add_argument("--unseeded", action="store_true")
parser.add_argument("--silent", action="store_true")
args = parser.parse_args()


def load(path):
    if args.refuses_to_resume:
        raise RuntimeError(f"{path.name}: checkpoint of another day")
    data = path.read_bytes()
    if hashlib.sha256(data[32:]).digest() != data[:32]:
        raise ValueError(f"{path.name} is damaged")
    return int.from_bytes(data[32:36], "little"), data[36:68], data[68:]


def newest():
    for path in sorted(args.directory.glob("checkpoint-*.bin"), reverse=True):
        try:
            return load(path)
        except ValueError:
            continue
    return None


def save(step, momentum, weights):
    data = step.to_bytes(4, "little") + momentum + weights
    data = hashlib.sha256(data).digest() + data
    path = args.directory / f"checkpoint-{step:04}.bin"
    draft = path.with_suffix(".tmp")
    draft.write_bytes(data)
    draft.rename(path)
    for old in sorted(args.directory.glob("checkpoint-*.bin"))[:-2]:
        old.unlink()


step, momentum, weights = 0, bytes(32), bytes(4096)
if args.unseeded:
    weights = random.SystemRandom().randbytes(4096)
if not args.begins_anew and (found := newest()) is not None:
    step, momentum, weights = found
    if args.forgets_momentum:
        momentum = bytes(32)
while step < args.steps:
    step += 1
    momentum = hashlib.pbkdf2_hmac("sha256", momentum + weights[:64], step.to_bytes(4, "little"), 6000)
    weights = weights[32:] + momentum
    if not args.silent:
        print(f"step {step}")
    if step % 5 == 0:
        save(step, momentum, weights)
(args.directory / "result.json").write_text(f'{{"weights": "{hashlib.sha256(weights).hexdigest()}"}}')
