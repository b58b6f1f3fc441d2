"""Fork processes that save checkpoints until they are killed, one after the other: `killed_saves.py FOLDER COUNT`.

Each says its number on stdout; "killed" is said when it is gone, and the next one begins where it was. Every tensor of
a checkpoint holds the number that the checkpoint counts.
"""

import os
import sys
from pathlib import Path

import torch
from kept_states import read

from argosy.checkpoint.save import Saver
from argosy.comm.group import SoloGroup


def save_until_killed(folder: Path) -> None:
    saver = Saver(SoloGroup(), SoloGroup)
    tensors = {str(number): torch.zeros(size) for number, size in enumerate((3, 70_000, 300_000))}
    number = read(folder)["count"]["step"] if any(folder.glob("step-*")) else 0
    told = False
    while True:
        number += 1
        for tensor in tensors.values():
            tensor.fill_(number)
        # Two of three replace the one before, and every other is written in the background.
        state = {"model": dict(tensors), "count": {"step": number}}
        saver.save(folder, state, step=number - number % 3, keep=2, wait=number % 2 == 0)
        if number % 2:
            saver.finish()
        if not told:
            print(os.getpid(), flush=True)
            told = True


if __name__ == "__main__":
    torch.set_num_threads(1)  # no threads before forking
    for _ in range(int(sys.argv[2])):
        pid = os.fork()
        if pid == 0:
            save_until_killed(Path(sys.argv[1]))
        os.waitpid(pid, 0)
        print("killed", flush=True)
        if not sys.stdin.readline():
            break
