"""The faults of tests/faults/ still fit the sources; `make mutate` plants and catches them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from faults import FAULTS
from faults.fault import Fault
from mutations import ROOT, main

from jagged_cuda.testing.cases import EVERY


def test_the_list_names_the_faults(capsys: pytest.CaptureFixture[str]) -> None:
    for device in ("cpu", "cuda"):
        assert main(["--list", "--device", device]) == 0
        chosen = [fault for fault in FAULTS if fault.device == device]
        expected = [f"{fault.name} (csrc/{fault.path}): {fault.check}" for fault in chosen]
        assert capsys.readouterr().out.splitlines() == expected != []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_fault_fits_the_sources(fault: Fault, tmp_path: Path) -> None:
    path = tmp_path / "csrc" / fault.path
    path.parent.mkdir(parents=True)
    shutil.copy(ROOT / "csrc" / fault.path, path)
    fault.plant(tmp_path)
    assert path.read_text() != (ROOT / "csrc" / fault.path).read_text()
    with pytest.raises(ValueError, match="must hold this once"):
        fault.plant(tmp_path)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_its_check_exists(fault: Fault) -> None:
    if fault.check.startswith("tests/"):
        file, _, selection = fault.check.partition(" -k ")
        names = re.findall(r"(?m)^def (test_\w+)", (ROOT / file).read_text())
        assert any(selection.split()[0] in name for name in names)
    else:
        assert fault.check.removeprefix("--op ") in EVERY
