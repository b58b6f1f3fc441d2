"""Train a small CNN on scikit-learn's handwritten digits: `argosy run --workers 2 examples/digits.py`."""

import argparse
import json

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import argosy


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,797 real images of 8 x 8 pixels, shuffled once; every fifth is for testing."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)[order] / 16
    y = torch.tensor(labels)[order]
    test = torch.arange(len(x)) % 5 == 0
    return TensorDataset(x[~test], y[~test]), TensorDataset(x[test], y[test])


class Net(nn.Sequential):
    def __init__(self, width: int = 64) -> None:
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(width * 16, 10),
        )


def accuracy(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> float:
    correct = seen = 0
    with torch.no_grad():
        for x, y in loader:
            correct += int((model(x).argmax(1) == y).sum())
            seen += len(y)
    return correct / max(seen, 1)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--epochs", type=int, default=12)
    options.add_argument("--batch-size", type=int, default=128)
    given = options.parse_args()

    torch.manual_seed(0)
    train, test = digits()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    fleet = argosy.init()
    model, optimizer, train_loader, test_loader = fleet.distribute(
        model,
        optimizer,
        DataLoader(train, batch_size=given.batch_size, shuffle=True),
        DataLoader(test, batch_size=given.batch_size),
    )
    for _ in range(given.epochs):
        for x, y in train_loader:
            fleet.step(x, y, cross_entropy)

    right = fleet.mean(accuracy(model, test_loader))
    fleet.print(f"test accuracy {right:.1%}")
    fleet.save(fleet.run_folder / "net", model, optimizer)
    if fleet.is_first:
        (fleet.run_folder / "result.json").write_text(json.dumps({"accuracy": right}))


if __name__ == "__main__":
    main()
