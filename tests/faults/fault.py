"""What a fault is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """A text that occurs once in a source file, and what a mistake would have made of it.

    Args:
        name: what went wrong.
        device: whose kernels.
        path: of the file in csrc/.
        text, instead: what is replaced, and by what.
        check: arguments of the fuzzer, or of pytest if it begins with a file of tests.
    """

    name: str
    device: str
    path: str
    text: str
    instead: str
    check: str = "--op jagged_flash_attention"

    def plant(self, root: Path) -> None:
        path = root / "csrc" / self.path
        text = path.read_text()
        if text.count(self.text) != 1:
            raise ValueError(f"{self.name}: csrc/{self.path} must hold this once: {self.text}")
        path.write_text(text.replace(self.text, self.instead))
