"""How will a user rate a film? Matrix factorisation on files as MovieLens has them.

    python examples/movielens.py --ratings ml-latest-small/ratings.csv
    argosy run --servers 1 --workers 2 --strategy "ps=async" examples/movielens.py --ratings ml-1m/ratings.dat

Known are `ratings.csv` (a header, commas), `ratings.dat` (`::` between the fields) and `u.data` (tabs). Without a file
a small one is made up. A rating is the mean, plus what the user adds and what the film adds, plus the product of their
rows (Koren et al., 2009). Users and films need not be counted or numbered: every id has a row from its first rating on.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import argosy

DIM = 8


@dataclass(frozen=True)
class Ratings:
    """Who rated what, and how."""

    users: Tensor
    films: Tensor
    stars: Tensor

    @classmethod
    def read(cls, path: Path) -> Ratings:
        """One rating in a line: user, film, stars, time. Ends with an error that names the line that is not one."""
        users, films, stars = [], [], []
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip() or (number == 1 and line.startswith("userId")):
                    continue
                separator = "::" if "::" in line else "\t" if "\t" in line else ","
                try:
                    user, film, given = line.split(separator)[:3]
                    users.append(int(user))
                    films.append(int(film))
                    stars.append(float(given))
                except ValueError:
                    raise SystemExit(f"{path}, line {number}: not a rating: {line.strip()!r}") from None
        if len(stars) < 10:
            raise SystemExit(f"{path}: {len(stars)} ratings are too few to learn from")
        return cls(torch.tensor(users), torch.tensor(films), torch.tensor(stars))

    def shuffled(self) -> Ratings:
        """Once, and the same everywhere."""
        return self.at(torch.randperm(len(self.stars), generator=torch.Generator().manual_seed(0)))

    def at(self, numbers: Tensor) -> Ratings:
        return Ratings(self.users[numbers], self.films[numbers], self.stars[numbers])


def make_up(path: Path, users: int = 600, films: int = 300, ratings: int = 60_000) -> None:
    """A file of ratings with something to learn: users and films differ, and so do tastes."""
    random = torch.Generator().manual_seed(0)
    user, film = (torch.randint(size, (ratings,), generator=random) for size in (users, films))
    harshness, quality = (0.4 * torch.randn(size, generator=random) for size in (users, films))
    tastes, traits = (torch.randn(size, 2, generator=random) for size in (users, films))
    liked = 3.5 + harshness[user] + quality[film] + 0.4 * (tastes[user] * traits[film]).sum(1)
    stars = (2 * (liked + 0.4 * torch.randn(ratings, generator=random))).round().clamp(1, 10) / 2
    lines = [f"{u + 1},{f + 1},{s},0" for u, f, s in zip(user.tolist(), film.tolist(), stars.tolist(), strict=True)]
    path.write_text("\n".join(["userId,movieId,rating,timestamp", *lines]) + "\n")


class Factors(nn.Module):
    def __init__(self, mean: float) -> None:
        super().__init__()
        rule, small = argosy.ps.Adagrad(lr=0.1), "normal:0.1"
        self.users = argosy.Embedding(DIM, name="users", initializer=small, optimizer=rule)
        self.films = argosy.Embedding(DIM, name="films", initializer=small, optimizer=rule)
        self.of_user = argosy.Embedding(1, name="of user", initializer="zeros", optimizer=rule)
        self.of_film = argosy.Embedding(1, name="of film", initializer="zeros", optimizer=rule)
        self.mean = nn.Parameter(torch.tensor([mean]))

    def forward(self, users: Tensor, films: Tensor) -> tuple[Tensor, Tensor]:
        """The expected stars, and how large the rows are that they come from."""
        user, film = self.users(users), self.films(films)
        biases = (self.of_user(users) + self.of_film(films)).squeeze(1)
        size = (user * user + film * film).sum(1).mean() + (biases * biases).mean()
        return self.mean + biases + (user * film).sum(1), size


def root_mean_square(errors: Tensor) -> float:
    return float(errors.square().mean().sqrt())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratings", type=Path, help="ratings.csv, ratings.dat or u.data")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--penalty", type=float, default=0.01, help="on the size of rows")
    options = parser.parse_args()

    if options.ratings is None:
        with tempfile.TemporaryDirectory() as folder:
            make_up(Path(folder) / "ratings.csv")
            known = Ratings.read(Path(folder) / "ratings.csv").shuffled()
    else:
        known = Ratings.read(options.ratings).shuffled()
    numbers = torch.arange(len(known.stars))
    train, test = known.at(numbers[numbers % 10 != 0]), known.at(numbers[numbers % 10 == 0])

    fleet = argosy.init()
    torch.manual_seed(0)
    model = Factors(float(train.stars.mean()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(train.users, train.films, train.stars), batch_size=options.batch, shuffle=True)
    model, optimizer, loader = fleet.distribute(model, optimizer, loader)
    loss = torch.tensor(0.0)  # of a worker that finds no samples left
    for _ in range(options.epochs):
        for users, films, stars in loader:
            optimizer.zero_grad()
            expected, size = model(users, films)
            loss = mse_loss(expected, stars)
            fleet.report(loss)
            (loss + options.penalty * size).backward()
            optimizer.step()
    fleet.mean(loss)  # all are here when it returns

    if fleet.is_first:
        with torch.no_grad():
            expected, _ = model(test.users, test.films)
        rmse = root_mean_square(expected - test.stars)
        plain = root_mean_square(train.stars.mean() - test.stars)
        print(f"test RMSE {rmse:.4f}; of the mean rating {plain:.4f}", flush=True)
        (fleet.run_folder / "result.json").write_text(json.dumps({"rmse": rmse, "rmse_of_mean": plain}))


if __name__ == "__main__":
    main()
