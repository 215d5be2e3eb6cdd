"""Building and loading: the cache, its locks, and the messages when it fails, on a toy package."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from toy_package import SOURCES, TIMEOUT, VISIBLE, Toy

from jagged_cuda import _build
from jagged_cuda._build import Build, BuildError

# ---------------------------------------------------------------------------------------------
# The cache


def test_the_first_import_compiles_and_the_second_starts_no_compiler(toy: Toy) -> None:
    result, err = toy.load()
    assert result["answer"] == 42
    assert result["loaded"]["_C_cpu"][1] == "compiled here"
    lines = err.strip().splitlines()
    assert lines[0].startswith("jagged_cuda: compiling for the CPU with ")
    assert lines[0].endswith(f", once; kept in {toy.cache}")
    assert lines[-1].startswith("jagged_cuda: done in ")
    calls = toy.calls()
    result, err = toy.load()
    assert result["answer"] == 42
    assert err == ""
    assert toy.calls() == calls


def test_eight_processes_at_once_compile_once(toy: Toy) -> None:
    processes = [toy.start() for _ in range(8)]
    for process in processes:
        out, err = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0, err
        assert json.loads(out)["answer"] == 42
    assert len(toy.compiled()) == 2


def test_a_killed_build_leaves_a_usable_cache(toy: Toy) -> None:
    (toy.root / "sleep").touch()
    process = toy.start()
    waiter = None
    try:
        deadline = time.monotonic() + TIMEOUT
        while not (toy.root / "sleeping").exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        assert list(toy.cache.glob("work-*/building"))
        (toy.root / "sleep").unlink()
        waiter = toy.start()
        process.kill()  # its compilers live on for now, as they do when a job is killed
        out, err = waiter.communicate(timeout=TIMEOUT)
        assert waiter.returncode == 0, err
        assert json.loads(out)["answer"] == 42
        assert not list(toy.cache.glob("*abandoned*")) + list(toy.cache.glob("work-*/building"))
    finally:
        for started in (process, waiter):
            if started is not None:
                with_group = os.getpgid(started.pid) if started.poll() is None else started.pid
                try:
                    os.killpg(with_group, signal.SIGKILL)
                except ProcessLookupError:
                    continue
                finally:
                    started.communicate()
    assert toy.load()[1] == ""


def test_a_changed_source_file_is_compiled_and_nothing_else(toy: Toy) -> None:
    first = toy.load()[0]["loaded"]["_C_cpu"][0]
    (toy.csrc / "cpu" / "toy.cpp").write_text(f"{VISIBLE} int toy_other() {{ return 8; }}\n")
    second = toy.load()[0]["loaded"]["_C_cpu"][0]
    assert first != second
    names = [Path(name).name for name in toy.compiled()]
    assert sorted(names) == ["library.cpp", "toy.cpp", "toy.cpp"]


def test_a_changed_header_compiles_what_includes_it(toy: Toy) -> None:
    assert toy.load()[0]["answer"] == 42
    (toy.csrc / "answer.h").write_text("constexpr int kAnswer = 43;\n")
    os.utime(toy.csrc / "answer.h", (0, 0))  # as an archive's file may be dated
    assert toy.load()[0]["answer"] == 43
    names = [Path(name).name for name in toy.compiled()]
    assert sorted(names) == ["library.cpp", "library.cpp", "toy.cpp"]
    (toy.csrc / "answer.h").write_text(SOURCES["answer.h"])
    calls = toy.calls()
    assert toy.load()[0]["answer"] == 42  # what was built before is still there
    assert toy.calls() == calls


def test_a_home_that_cannot_be_written_to_gives_way_to_the_temporary_folder(toy: Toy) -> None:
    del toy.env["JAGGED_CUDA_CACHE"]
    temporary = toy.root / "tmp"
    temporary.mkdir()
    if os.getuid() == 0:  # whom no mode keeps from writing
        home = Path("/proc/self")
    else:
        home = toy.root / "home"
        home.mkdir(mode=0o500)
    toy.env |= {"HOME": str(home), "TMPDIR": str(temporary), "XDG_CACHE_HOME": ""}
    result, _ = toy.load()
    folder = temporary / f"jagged_cuda-{os.getuid()}"
    assert result["loaded"]["_C_cpu"][0].startswith(str(folder))
    assert folder.stat().st_mode & 0o077 == 0
    assert toy.load()[1] == ""


def test_a_temporary_folder_that_others_can_write_to_is_not_trusted(toy: Toy) -> None:
    temporary = toy.root / "tmp"
    shared = temporary / f"jagged_cuda-{os.getuid()}"
    shared.mkdir(parents=True)
    shared.chmod(0o777)
    del toy.env["JAGGED_CUDA_CACHE"]
    toy.env |= {"HOME": "/proc/self", "TMPDIR": str(temporary), "XDG_CACHE_HOME": "/proc/self"}
    message = toy.fails()
    assert message.startswith("jagged_cuda cannot write to /proc/self/jagged_cuda or ")
    assert message.endswith(
        f"{shared}, or others can: set JAGGED_CUDA_CACHE to a folder of your own."
    )


def test_a_named_cache_that_cannot_be_written_to_is_an_error(toy: Toy) -> None:
    toy.env["JAGGED_CUDA_CACHE"] = "/proc/self/jagged_cuda"
    assert toy.fails().startswith("jagged_cuda cannot write to /proc/self/jagged_cuda, or ")


def test_without_its_compiler_what_was_compiled_still_serves(toy: Toy) -> None:
    toy.load()
    toy.env |= {"CXX": "/nonexistent/c++"}
    result, err = toy.load()
    assert result["answer"] == 42
    assert err == ""


# ---------------------------------------------------------------------------------------------
# What is said when the CPU library cannot be built


def test_a_compiler_of_several_words_and_a_foreign_cc(toy: Toy) -> None:
    toy.env |= {"CXX": f"env A=1 {toy.root / 'c++'}", "CC": "/nonexistent/cc"}
    assert toy.load()[0]["answer"] == 42
    assert len(toy.compiled()) == 2


def test_the_environment_in_which_torch_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "gcc")
    monkeypatch.delenv("MAX_JOBS", raising=False)
    before = dict(os.environ)
    with Build("_C_cpu", tmp_path, (), torch, ("g++", "-m64")).cpp_extension(tmp_path):
        # ninja of an environment that is not activated, and as many compilers as memory takes.
        assert os.environ["PATH"].startswith(str(Path(sys.executable).parent))
        assert 1 <= int(os.environ["MAX_JOBS"]) <= len(os.sched_getaffinity(0))
        assert "CC" not in os.environ
        assert Path(os.environ["CXX"]).read_text() == '#!/bin/sh\nexec g++ -m64 "$@"\n'
    assert dict(os.environ) == before


def test_no_ninja(monkeypatch: pytest.MonkeyPatch) -> None:
    build = Build("_C_cpu", Path(), (), torch)
    monkeypatch.setattr(_build, "path_with_ninja", lambda: "/nonexistent")
    with pytest.raises(
        BuildError, match=r"^jagged_cuda compiles with ninja, which is missing: pip"
    ):
        build.check()


def test_no_compiler(toy: Toy) -> None:
    toy.env["CXX"] = "/nonexistent/c++"
    assert toy.fails() == (
        "jagged_cuda needs g++ 11 or clang++ 14, or newer, and CXX=/nonexistent/c++ was not found: "
        "install one (Debian, Ubuntu: apt-get install g++), or set CXX to one."
    )


def test_a_failed_compilation_names_its_log_and_shows_its_end(toy: Toy) -> None:
    (toy.csrc / "cpu" / "toy.cpp").write_text("int f() { return undeclared; }\n")
    message = toy.fails()
    (log,) = toy.cache.glob("work-*/build.log")
    assert message.startswith(
        f"compiling csrc/cpu/toy.cpp failed; the whole output is in {log}; it says:\n"
    )
    assert "undeclared" in message
    assert "undeclared" in log.read_text()


def test_files_of_a_folder_are_compiled_as_one(toy: Toy) -> None:
    """And what is wrong with one of them is said of that one."""
    other = toy.csrc / "cpu" / "other.cpp"
    other.write_text(f"{VISIBLE} int toy_third() {{ return 8; }}\n")
    assert toy.load()[0]["answer"] == 42
    calls = (toy.root / "calls").read_text().splitlines()
    assert sum(" -c " in line for line in calls) == 2  # library.cpp, and these two
    (joined,) = toy.cache.glob("work-*/joined/*.cpp")
    assert joined.read_text() == '#include "cpu/other.cpp"\n#include "cpu/toy.cpp"\n'
    (toy.csrc / "cpu" / "toy.cpp").write_text("int f() { return undeclared; }\n")
    message = toy.fails()
    assert message.startswith("compiling csrc/cpu/toy.cpp failed; ")
    assert "undeclared" in message


def test_what_failed_can_be_tried_again_in_the_same_process(toy: Toy) -> None:
    (toy.root / "fail").write_text("out of luck\n")
    script = """
        import pathlib
        from jagged_cuda import _build, _load
        {before}
        try:
            _load.load_libraries()
        except _build.BuildError as error:
            assert "out of luck" in str(error)
            pathlib.Path("fail").unlink()
        _load.load_libraries()
    """
    process = toy.start(script=script)
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, err


def test_a_full_disk(toy: Toy) -> None:
    (toy.root / "fail").write_text("fatal error: closing x.o: No space left on device\n")
    assert toy.fails() == (
        "_C_cpu cannot be written or loaded (No space left on device): remove it, "
        "or set JAGGED_CUDA_CACHE to a folder with room, from which programs may run."
    )
    (toy.root / "fail").unlink()
    assert toy.load()[0]["answer"] == 42


def test_an_old_compiler(tmp_path: Path) -> None:
    cxx = tmp_path / "c++"
    cxx.touch(0o755)
    for does, problem in (
        ("echo 'g++ (GCC) 9.4.0'", "is g++ (GCC) 9.4.0"),
        ("echo 'clang version 10.0.0'", "is clang version 10.0.0"),
        ("exit 1", "does not run"),
    ):
        cxx.write_text(f"#!/bin/sh\n{does}\n")
        with pytest.raises(BuildError) as error:
            _build.check_cxx((str(cxx),))
        assert f"or newer, and {cxx} {problem}: install one" in str(error.value)
    for good in ("g++ (GCC) 11.4.1 20231218 (Red Hat 11.4.1-3)", "Debian clang version 14.0.6"):
        cxx.write_text(f"#!/bin/sh\necho '{good}'\n")
        assert _build.check_cxx((str(cxx),)) == good


def test_an_old_torch(toy: Toy) -> None:
    (toy.torch / "version.py").write_text("__version__ = '2.9.1+cu128'\ncuda = hip = None\n")
    assert toy.fails() == (
        "jagged_cuda needs torch 2.10 or newer and this is torch 2.9.1+cu128: "
        "pip install --upgrade torch."
    )


def test_a_library_that_does_not_load(toy: Toy) -> None:
    toy.load()
    library = next(toy.cache.glob("_C_cpu-*.so"))
    library.write_bytes(b"not a library")
    message = toy.fails()
    assert message.startswith(f"_C_cpu cannot be written or loaded ({library}: ")
