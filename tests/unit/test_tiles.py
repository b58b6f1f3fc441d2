import subprocess
import sys

import pytest

from argosy.optim import tiles

PRODUCTS = """
import torch, argosy
argosy.init(run_folder=".")
short = torch.ones(512, 512, dtype=torch.bfloat16)
assert (short @ short)[0, 0] == 512
"""


def test_products_in_16_bits_end_no_process() -> None:
    # Where a virtual machine hides the shape of AMX's tiles, torch alone dies of this ("Illegal instruction").
    subprocess.run([sys.executable, "-c", PRODUCTS], check=True, timeout=60)


@pytest.mark.parametrize(("hidden", "chosen"), [(True, None), (True, "AVX2"), (False, None)])
def test_tiles_are_avoided_only_where_they_are_hidden_and_nobody_has_chosen(
    monkeypatch: pytest.MonkeyPatch, hidden: bool, chosen: str | None
) -> None:
    monkeypatch.setattr(tiles, "tiles_are_hidden", lambda: hidden)
    environment = {} if chosen is None else {tiles.VARIABLE: chosen}
    avoided = {tiles.VARIABLE: "AVX512_CORE_FP16"} if hidden and chosen is None else {}
    assert tiles.tile_variables(environment) == avoided


def test_who_computes_in_16_bits_without_tiles_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "tiles_are_hidden", lambda: True)
    with pytest.warns(UserWarning, match="does not tell the shape of its tiles"):
        tiles.warn_of_hidden_tiles()
