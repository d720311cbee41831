"""Conversions on Ray: what the driver does, with ray's interface in threads."""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import relayout_on_ray as on_ray
from support.fake_ray import FakeRay
from support.loader_fixtures import MIB, mlp_model
from support.trees import content

import relayout
from relayout.conversion import jobs
from relayout.errors import FormatError, PlanError

OPTIONS: dict[str, Any] = {"tp": 4, "max_part_nbytes": MIB // 4}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = mlp_model(tmp_path_factory.mktemp("ray") / "source")
    relayout.convert(source, source.parent / "expected", **OPTIONS)
    return source


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """In place of the package."""
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)  # type: ignore[arg-type]
    return fake


def assert_same(output: Path, source: Path) -> None:
    assert content(output) == content(source.parent / "expected")
    assert not list(output.parent.glob(".*"))


def test_tasks_convert_all_units_and_the_driver_publishes(source: Path, tmp_path: Path, ray: FakeRay) -> None:
    ray.resources = [{}, {"CPU": 2.0}, {"CPU": 4.0}]
    told: list[tuple[int, int]] = []
    progress = lambda *done: told.append(done)  # noqa: E731
    done = on_ray.convert(
        relayout.plan_conversion(source, tmp_path / "out", **OPTIONS), progress=progress, address="auto"
    )
    assert_same(tmp_path / "out", source)
    assert told[-1] == (done.source_nbytes, done.source_nbytes)
    assert (done.resumed_nbytes, done.peak_nbytes > 0) == (0, True)
    [init] = ray.inits
    assert init["address"] == "auto"
    assert init["runtime_env"]["py_modules"] == [str(Path(relayout.__file__).parent)]
    assert ray.working_files == []  # Nothing of the driver's working folder.
    assert ray.asked[0]["num_cpus"] == 2  # So many of the threads of a task as every node has processors.
    assert not ray.is_up


@pytest.mark.parametrize("address", ["garbage", "host", "ray://x", "http://host:1", "host:port", "-"])
def test_what_is_no_address_of_a_cluster_is_said(source: Path, tmp_path: Path, ray: FakeRay, address: str) -> None:
    with pytest.raises(PlanError, match="not the address of a Ray cluster: expected HOST:PORT"):
        on_ray.convert(relayout.plan_conversion(source, tmp_path / "out", **OPTIONS), address=address)
    assert not ray.inits


@pytest.mark.parametrize("by", ["argument", "RAY_ADDRESS"])
@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_at_which_nobody_answers_is_told_at_once(
    source: Path,
    tmp_path: Path,
    ray: FakeRay,
    monkeypatch: pytest.MonkeyPatch,
    by: str,
    scheme: str,
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"{scheme}127.0.0.1:{nobody.getsockname()[1]}"
        if by == "RAY_ADDRESS":
            monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(OSError, match="no Ray cluster at this address: ConnectionRefusedError"):
            on_ray.convert(
                relayout.plan_conversion(source, tmp_path / "out", **OPTIONS),
                address=address if by == "argument" else "auto",
            )
    assert not ray.inits


def test_auto_is_the_address_of_the_environment_also_that_of_a_client(
    source: Path, tmp_path: Path, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"ray://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        on_ray.convert(relayout.plan_conversion(source, tmp_path / "out", **OPTIONS))
    assert [one["address"] for one in ray.inits] == [address]


def test_a_node_that_lacks_a_package_is_one_line(
    source: Path, tmp_path: Path, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:

    def lacking(*_: Any, **options: Any) -> Any:
        raise RuntimeError("The remote function failed to import on the worker.\nNo module named 'xxhash'\nmore")

    monkeypatch.setattr(jobs, "convert_unit", lacking)
    with pytest.raises(PlanError, match=r"^a node of the Ray cluster lacks the package xxhash: install [^\n]*$"):
        on_ray.convert(relayout.plan_conversion(source, tmp_path / "out", **OPTIONS))


def test_a_node_says_how_many_units_it_converts_at_once(source: Path, tmp_path: Path, ray: FakeRay) -> None:
    ray.resources = [{"CPU": 64.0, "relayout_io": 2.0}]
    ray.is_up = True  # The caller has connected to a cluster.
    on_ray.convert(relayout.plan_conversion(source, tmp_path / "out", **OPTIONS))
    asked = ray.asked[0]
    assert (asked["num_cpus"], asked["resources"], asked["max_retries"]) == (1, {"relayout_io": 1}, 5)
    assert ray.is_up
    assert not ray.inits


def test_lost_tasks_are_run_again_and_if_it_goes_on_the_driver_gives_up(
    source: Path, tmp_path: Path, ray: FakeRay
) -> None:
    ray.lost = 4
    on_ray.convert(relayout.plan_conversion(source, tmp_path / "out", **OPTIONS))
    assert_same(tmp_path / "out", source)
    ray.lost = 6
    with pytest.raises(OSError, match=r"was lost 6 times: Task failed because the node it was running on is dead$"):
        on_ray.convert(relayout.plan_conversion(source, tmp_path / "again", **OPTIONS))
    assert not (tmp_path / "again").exists()


def test_a_read_that_fails_is_tried_again_and_what_is_damaged_is_not(
    source: Path, tmp_path: Path, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    convert_unit = jobs.convert_unit

    def failing(planned: Any, unit: int, **options: Any) -> Any:
        tried.append(unit)
        if unit == 1 and tried.count(1) < 3:
            raise OSError(5, "the drive is on fire", "a file")
        return convert_unit(planned, unit, **options)

    monkeypatch.setattr(jobs, "convert_unit", failing)
    on_ray.convert(relayout.plan_conversion(source, tmp_path / "out", **OPTIONS))
    assert tried.count(1) == 3
    assert_same(tmp_path / "out", source)

    def damaged(*_: Any, **options: Any) -> Any:
        raise FormatError("is damaged", path="model.safetensors", tensor="x", code="digest")

    monkeypatch.setattr(jobs, "convert_unit", damaged)
    with pytest.raises(FormatError, match=r"^model.safetensors: tensor 'x': is damaged$") as caught:
        on_ray.convert(relayout.plan_conversion(source, tmp_path / "again", **OPTIONS))
    assert caught.value.code == "digest"
    assert ray.cancelled


def test_an_interruption_cancels_what_runs_and_the_same_call_goes_on(
    source: Path, tmp_path: Path, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_done = threading.Semaphore(0)

    def interrupt(done: int, total: int) -> None:
        if 0 < done < total:
            num_done.release()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        on_ray.convert(relayout.plan_conversion(source, tmp_path / "out", **OPTIONS), progress=interrupt)
    assert num_done.acquire(blocking=False)
    assert ray.cancelled
    assert not (tmp_path / "out").exists()
    told: list[tuple[int, int]] = []
    again = on_ray.convert(
        relayout.plan_conversion(source, tmp_path / "out", **OPTIONS), progress=lambda *done: told.append(done)
    )
    assert again.resumed_nbytes > 0
    assert told[-1] == (again.source_nbytes, again.source_nbytes)
    assert_same(tmp_path / "out", source)


def test_without_ray_the_package_is_named(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PlanError, match=r"ray is not installed: pip install 'ray>=2\.49'$"):
        on_ray.convert(relayout.plan_conversion(source, tmp_path / "out", **OPTIONS))
    assert not list(tmp_path.iterdir())


def run_main(monkeypatch: pytest.MonkeyPatch, source: Path, output: Path, *words: str) -> None:
    arguments = [str(source), "-o", str(output), "--tp", "4", "--max-part-size", str(MIB // 4), *words]
    monkeypatch.setattr(sys, "argv", ["relayout_on_ray.py", *arguments])
    on_ray.main()


def test_the_file_is_a_program(
    source: Path, tmp_path: Path, ray: FakeRay, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_main(monkeypatch, source, tmp_path / "out", "--address", "local", "--threads", "2", "--memory", "128MiB")
    assert_same(tmp_path / "out", source)
    assert [one["address"] for one in ray.inits] == ["local"]
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'out'}: 4 ranks, ")
    with pytest.raises(SystemExit, match=r"^error: .*/out: already holds .* --force replaces it$"):
        run_main(monkeypatch, source, tmp_path / "out")
    with pytest.raises(SystemExit, match=r"^error: .* no built-in plan 'unknown'"):
        run_main(monkeypatch, source, tmp_path / "out", "--plan", "unknown")
    run_main(monkeypatch, source, tmp_path / "out", "--force")
    assert_same(tmp_path / "out", source)
