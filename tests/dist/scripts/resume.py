"""Train some epochs from a checkpoint to another: `resume.py OUT EPOCHS FROM TO [STEPS]` (`-` for none).

With STEPS, the run is saved in the middle of its last epoch, after that many steps of it, and ends there; and in the
background, before that epoch.
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import argosy

out, epochs, source, target = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.manual_seed(0)
x = torch.randn(53, 8)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
fleet = argosy.init()
model, optimizer, loader = fleet.distribute(
    model, optimizer, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=12, shuffle=True)
)
if source != "-":
    fleet.load(source, model, optimizer, scheduler, loader)
steps = int(sys.argv[5]) if len(sys.argv) > 5 else None
losses = []
for epoch in range(epochs):
    for step, (x, y) in enumerate(loader, 1):
        losses.append(float(fleet.step(x, y, nn.functional.mse_loss)))
        if (epoch + 1, step) == (epochs, steps):
            break
    else:
        scheduler.step()
        if target != "-" and epoch + 2 == epochs and steps is not None:
            fleet.save(target, model, optimizer, scheduler, loader, wait=False)
if target != "-":  # in the middle of an epoch, if the loop was broken off
    fleet.save(target, model, optimizer, scheduler, loader, keep=3)
    fleet.export(f"{target}.safetensors", model)
if fleet.is_first:
    out.write_text(json.dumps(losses))
