import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import argosy

torch.manual_seed(0)
inputs = torch.randn(1000, 20)
targets = inputs @ torch.randn(20, 1) + 0.1 * torch.randn(1000, 1)

model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=32, shuffle=True)

fleet = argosy.init()
model, optimizer, loader = fleet.distribute(model, optimizer, loader)

for epoch in range(5):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        fleet.report(loss)  # optional: shows the loss in the progress line
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            fleet.print(f"epoch {epoch} step {step} loss {fleet.mean(loss):.4f}")

fleet.save("net", model, optimizer)
