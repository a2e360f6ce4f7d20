"""What ships for the tool agent: tasks that can be done, that no trap and no idleness solves."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from tests.bundled.tool_agent import (
    EXAMPLE,
    called,
    module,
    needs_bubblewrap,
    row,
    rows,
    shell,
    tried,
)

from loops_cookbook.tasks import load_tasks

FILES = ("tasks.jsonl", "held_out.jsonl")
KINDS = (
    *("word", "copy", "count-lines", "paid-orders", "largest", "distinct", "paid-sum"),
    *("remove-temporary", "change-port", "join-parts", "best-customer", "rename"),
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def drawn() -> Iterator[tuple[dict[str, Any], Any]]:
    """Every task that ships, with what it was drawn from."""
    make_tasks = module("make_tasks")
    for file, draws in make_tasks.draws().items():
        yield from zip(rows(file), draws.values(), strict=True)


@pytest.mark.parametrize(("file", "count"), [*zip(FILES, (96, 36), strict=True)])
def test_every_line_is_a_task_of_the_episode(file: str, count: int) -> None:
    assert len(load_tasks(EXAMPLE / file, module("episode").FileTask)) == count


def test_the_files_are_what_their_script_makes() -> None:
    for file, text in module("make_tasks").task_files().items():
        assert (EXAMPLE / file).read_text(encoding="utf-8") == text


def test_the_kinds_are_a_ladder_and_all_are_held_out_too() -> None:
    for file in FILES:
        rungs = {task["name"].rpartition("-")[0]: task["rung"] for task in rows(file)}
        assert tuple(rungs) == KINDS
        assert [*rungs.values()] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]


def test_no_task_stands_twice_or_is_held_out_and_trained() -> None:
    tasks = [task for file in FILES for task in rows(file)]
    assert len({(task["instruction"], str(task["files"])) for task in tasks}) == len(tasks)


def test_no_instruction_tells_the_answer_but_that_of_the_word() -> None:
    for task, draw in drawn():
        given = set("".join([*task["files"].values(), task["instruction"]]).split())
        for text in draw.wanted.values():
            if task["rung"] > 1 and text and text.strip().isdecimal():
                assert text not in given or task["name"].startswith("largest")


def test_a_draw_whose_trap_does_no_harm_is_thrown_away() -> None:
    make_tasks = module("make_tasks")
    rng = random.Random(1)
    plain = [make_tasks.KINDS["best-customer"][1](rng) for _ in range(50)]
    assert any(draw.trapped.items() <= draw.wanted.items() for draw in plain)
    for kind in KINDS:
        for _ in range(50):
            draw = make_tasks.drawn(rng, kind)
            assert not draw.trapped or not draw.trapped.items() <= draw.wanted.items()


# --- In a sandbox: the right way, the trap, and nothing at all


async def earned(task: dict[str, Any], *commands: str) -> float | None:
    result = await tried(task, *map(shell, commands))
    assert result.detail == ""
    assert result.metadata["calls"] == len(commands)
    return result.reward


async def holds(task: dict[str, Any], draw: Any) -> None:
    assert await earned(task, draw.right) == 1.0
    assert await earned(task, draw.trap) == 0.0
    assert await earned(task) == 0.0


@needs_bubblewrap
@pytest.mark.anyio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_task_is_solved_the_right_way_and_neither_by_the_trap_nor_idly(kind: str) -> None:
    (found,) = [pair for pair in drawn() if pair[0] == row(f"{kind}-1")]
    await holds(*found)


@needs_bubblewrap
@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("kind", KINDS)
async def test_so_is_every_task_that_ships(kind: str) -> None:
    for task, draw in drawn():
        if task["name"].rpartition("-")[0] == kind:
            await holds(task, draw)


@needs_bubblewrap
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("name", "commands", "reward"),
    [
        # What a careful model may do instead.
        ("paid-orders-1", ["cat {in}", "awk -F, '$2 == \"paid\"' {in} | wc -l > {out}"], 1.0),
        ("largest-1", ["sort -rn {in} | sed -n 1p > {out}"], 1.0),
        ("distinct-1", ["sort {in} | uniq > {out}"], 1.0),
        ("remove-temporary-1", ["find . -name '*.tmp' -delete"], 1.0),
        ("join-parts-1", ["for n in $(seq 14); do cat parts/part-$n.txt; done > {out}"], 1.0),
        # Other traps than the one that a task was made around.
        ("count-lines-1", ["wc {in} > {out}"], 0.0),
        ("paid-orders-1", ["grep -w paid {in} > {out}"], 0.0),
        ("paid-orders-1", ["grep -c ,paid {in}"], 0.0),
        ("distinct-1", ["sort {in} > {out}"], 0.0),
        ("paid-sum-1", ["cut -d, -f3 {in} | paste -sd+ | bash -c 'echo $(($(cat)))' > {out}"], 0.0),
        ("remove-temporary-1", ["rm $(ls | grep '[.]tmp$')"], 0.0),
        ("join-parts-1", ["ls parts | sort -V > {out}"], 0.0),
        ("rename-1", ["for f in *.jpeg; do cp \"$f\" \"${f%.jpeg}.jpg\"; done"], 0.0),
    ],
)  # fmt: skip
async def test_other_ways_are_judged_by_what_they_leave(
    name: str, commands: list[str], reward: float
) -> None:
    task = row(name)
    names = {"in": next(iter(task["files"])), "out": task["graded"][0]}

    def written(command: str) -> str:
        return command.replace("{in}", names["in"]).replace("{out}", names["out"])

    assert await earned(task, *map(written, commands)) == reward


@needs_bubblewrap
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("content", "reward"),
    [("{it}", 1.0), ("{it}\n", 1.0), ("{it}.", 0.0), (" {it}", 0.0), ("", 0.0)],
)
async def test_a_file_may_be_written_by_the_other_tool(content: str, reward: float) -> None:
    task = row("word-1")
    it = task["instruction"].split()[3]
    reply = called("write_file", path=task["graded"][0], content=content.format(it=it))
    result = await tried(task, reply)
    assert (result.reward, result.metadata["rung_1"]) == (reward, reward == 1.0)
