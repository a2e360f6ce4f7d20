"""What ships for counting: right answers, an Episode that checks them, a policy that can read.

Answers are compared with a count made here, from the text that the model reads.
"""

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from types import ModuleType

import pytest

from loops_cookbook.renderers.chat_template import ChatTemplateRenderer
from loops_cookbook.renderers.tokenizers import ChatTokenizer, load_tokenizer
from loops_cookbook.tasks import load_tasks
from loops_cookbook.testing.episodes import attempt
from loops_cookbook.tokens import ids_of

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "counting"
PATTERN = ROOT / "patterns" / "custom_runtime" / "in_process_direct"
POLICY = ROOT / "models" / "counting"
FILES = ("tasks.jsonl", "held_out.jsonl", "trap.jsonl")
WINDOW = 64
REPLY = 4
TRAP_TASK = {
    "name": "trap",
    "instruction": "orders: paid, unpaid, paid. how many are paid?",
    "answer": "2",
    "trap_answer": "3",
}


def imported(path: Path) -> ModuleType:
    """A module of an example or a pattern, under a name that no other has."""
    name = f"{path.parent.name}_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec
        assert spec.loader
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def lines_of(file: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (EXAMPLE / file).read_text(encoding="utf-8").splitlines()]


def orders_in(instruction: str) -> tuple[str, ...]:
    found = re.fullmatch(r"orders: ([a-z, ]+)\. how many are paid\?", instruction)
    assert found, instruction
    return tuple(found[1].split(", "))


def order_lists(file: str) -> set[tuple[str, ...]]:
    return {orders_in(line["instruction"]) for line in lines_of(file)}


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return load_tokenizer(POLICY, name="models/counting")


# --- Tasks


@pytest.mark.parametrize(("file", "count"), [*zip(FILES, (512, 128, 128), strict=True)])
def test_every_line_is_a_task_of_the_episode(file: str, count: int) -> None:
    tasks = load_tasks(EXAMPLE / file, imported(EXAMPLE / "episode.py").CountingTask)
    assert len(tasks) == count


@pytest.mark.parametrize("file", FILES)
def test_answers_are_what_the_text_says(file: str) -> None:
    for line in lines_of(file):
        orders = orders_in(line["instruction"])
        paid, unpaid = orders.count("paid"), orders.count("unpaid")
        assert line["answer"] == str(paid)
        assert line.get("trap_answer") == (str(paid + unpaid) if unpaid else None)


def test_a_held_out_list_of_orders_stands_in_one_file_only() -> None:
    lists = [order_lists(file) for file in FILES]
    assert len(set().union(*lists)) == sum(len(lines_of(file)) for file in FILES)


def test_the_tasks_are_a_ladder() -> None:
    sizes: dict[str, set[tuple[int, bool]]] = {}
    for line in lines_of("tasks.jsonl"):
        orders = orders_in(line["instruction"])
        level = line["name"].partition("-")[0]
        sizes.setdefault(level, set()).add((len(orders), "unpaid" in orders))
    assert sizes == {
        "level1": {(n, False) for n in (3, 4)},
        "level2": {(n, False) for n in range(5, 10)},
        "level3": {(n, True) for n in range(5, 10)},
        "level4": {(n, True) for n in (10, 11, 12)},
    }


def test_every_task_of_the_trap_file_has_the_trap() -> None:
    assert all("trap_answer" in line for line in lines_of("trap.jsonl"))


# --- The Episode


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("reply", "reward", "well_formed", "fell_in_trap"),
    [
        ("2", 1.0, True, False),
        ("3", 0.0, True, True),
        ("1", 0.0, True, False),
        ("2 2", 0.0, False, False),
        ("paid", 0.0, False, False),
        ("", 0.0, False, False),
    ],
)
async def test_only_the_right_number_earns_and_the_trap_is_told(
    reply: str, reward: float, well_formed: bool, fell_in_trap: bool
) -> None:
    episode = imported(EXAMPLE / "episode.py").CountingEpisode
    tried = await attempt(episode, TRAP_TASK, replies=[reply])
    assert tried.reward == reward
    assert dict(tried.metadata) == {"well_formed": well_formed, "fell_in_trap": fell_in_trap}


@pytest.mark.anyio
async def test_the_model_is_shown_no_answer() -> None:
    episode = imported(EXAMPLE / "episode.py").CountingEpisode
    tried = await attempt(episode, TRAP_TASK, replies=["2"])
    assert [dict(m) for m in tried.transcript[0].messages] == [
        {"role": "user", "content": TRAP_TASK["instruction"]}
    ]


# --- The policy, as the renderer sees it


def test_the_policy_knows_every_word_of_every_task(tokenizer: ChatTokenizer) -> None:
    unknown = tokenizer.id_of("<unk>")
    for line in (line for file in FILES for line in lines_of(file)):
        text = " ".join(v for k, v in line.items() if k != "name")
        assert unknown not in tokenizer.encode(text), line


def test_other_words_are_one_unknown_token(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.encode("how many are lost?")[-2:] == [
        tokenizer.id_of("<unk>"),
        tokenizer.id_of("?"),
    ]


def test_decoding_gives_the_text_of_a_task_back(tokenizer: ChatTokenizer) -> None:
    text = lines_of("trap.jsonl")[0]["instruction"]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_prompt_leaves_room_for_a_reply(tokenizer: ChatTokenizer) -> None:
    renderer = ChatTemplateRenderer(tokenizer)
    lengths = [
        len(renderer.render([{"role": "user", "content": line["instruction"]}]))
        for file in FILES
        for line in lines_of(file)
    ]
    assert max(lengths) + REPLY <= WINDOW


def test_a_prompt_is_the_question_and_the_turn_of_the_assistant(tokenizer: ChatTokenizer) -> None:
    prompt = ChatTemplateRenderer(tokenizer).render([{"role": "user", "content": "paid, 3?"}])
    assert [tokenizer.text_of(i) for i in prompt] == [
        *("<user>", "paid", ",", "3", "?", "<end>", "<assistant>"),
    ]


def test_a_conversation_is_extended_and_a_reply_ends_at_its_end_token(
    tokenizer: ChatTokenizer,
) -> None:
    renderer = ChatTemplateRenderer(tokenizer)
    question = {"role": "user", "content": "how many are paid?"}
    reply = ids_of(tokenizer.encode("3<end>"))
    asked = renderer.render([question])
    again = renderer.extend(asked, reply, [question])
    assert renderer.stop_token_ids == (tokenizer.id_of("<end>"),)
    assert renderer.parse(reply).content == "3"
    assert again is not None
    history = [question, {"role": "assistant", "content": "3"}, question]
    assert again.tolist() == renderer.render(history).tolist()


def test_the_template_refuses_roles_that_the_policy_was_never_taught(
    tokenizer: ChatTokenizer,
) -> None:
    with pytest.raises(ValueError, match="user and assistant, not system"):
        ChatTemplateRenderer(tokenizer).render([{"role": "system", "content": "paid"}])


def test_the_policy_is_small_and_in_half_precision() -> None:
    assert sum(path.stat().st_size for path in POLICY.iterdir()) < 1_000_000
    weights = (POLICY / "model.safetensors").read_bytes()
    header = json.loads(weights[8 : 8 + int.from_bytes(weights[:8], "little")])
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    assert {tensor["dtype"] for tensor in tensors} == {"F16"}


# --- The policy, and the recipe that made it


def accuracy(policy: Path, file: str) -> tuple[float, float]:
    """The share of right replies, exact without sampling: at temperature 1, and greedy."""
    torch = pytest.importorskip("torch")
    transformers = importlib.import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(policy, dtype="float32")
    tokenizer = load_tokenizer(policy, name=str(policy))
    sampled: list[float] = []
    greedy: list[bool] = []
    for line in lines_of(file):
        text = f"<user>{line['instruction']}<end><assistant>{line['answer']}<end>"
        ids = torch.tensor([tokenizer.encode(text)])
        with torch.inference_mode():
            logprobs = model(input_ids=ids).logits[0, -3:-1].log_softmax(-1)
        reply = ids[0, -2:]
        sampled.append(logprobs.gather(-1, reply[:, None]).sum().exp().item())
        greedy.append(bool((logprobs.argmax(-1) == reply).all()))
    return fmean(sampled), fmean(greedy)


def assert_it_can_count_but_its_habit_is_the_trap(policy: Path) -> None:
    sampled, greedy = accuracy(policy, "held_out.jsonl")
    assert 0.5 < sampled < 0.65
    assert 0.45 < greedy < 0.55  # right where there is no trap, which is half of the tasks
    sampled, greedy = accuracy(policy, "trap.jsonl")
    assert 0.2 < sampled < 0.4
    assert greedy < 0.1


@pytest.mark.torch
def test_the_policy_can_count_but_its_habit_is_the_trap() -> None:
    assert_it_can_count_but_its_habit_is_the_trap(POLICY)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(1200)
def test_the_recipe_makes_such_a_policy(tmp_path: Path) -> None:
    """As its README says: `loops run examples/sft_orders/train.toml`, and `loops export`."""
    loops(tmp_path, "run", "examples/sft_orders/train.toml", "--set", "evaluation.every=0")
    (run,) = (tmp_path / "runs" / "sft_orders").iterdir()
    loops(tmp_path, "export", str(run), "policy", "--merged")
    assert_it_can_count_but_its_habit_is_the_trap(tmp_path / "policy")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "policy" / file).read_bytes() == (POLICY / file).read_bytes()


def loops(folder: Path, *arguments: str) -> None:
    command = [str(Path(sys.executable).with_name("loops")), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_script_writes_the_task_files_that_ship() -> None:
    made = imported(EXAMPLE / "make_tasks.py").task_files()
    for file in FILES:
        assert "".join(made[file]) == (EXAMPLE / file).read_text(encoding="utf-8")


def test_transformers_reads_the_same_prompt_as_the_renderer(tokenizer: ChatTokenizer) -> None:
    transformers = importlib.import_module("transformers")
    messages = [{"role": "user", "content": lines_of("tasks.jsonl")[0]["instruction"]}]
    theirs = transformers.AutoTokenizer.from_pretrained(POLICY).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True
    )
    assert theirs["input_ids"] == ChatTemplateRenderer(tokenizer).render(messages).tolist()


# --- The smallest pattern


def test_the_pattern_has_one_task_with_the_right_answer() -> None:
    (task,) = load_tasks(
        PATTERN / "tasks.jsonl", imported(PATTERN / "direct_episode.py").AnswerTask
    )
    states = re.fullmatch(r".* 30 orders: ([a-z, ]+)\. .*", task.value.instruction)
    assert states
    assert task.value.answer == str(states[1].split(", ").count("paid"))


@pytest.mark.anyio
@pytest.mark.parametrize(("reply", "reward"), [("15", 1.0), (" 15\n", 1.0), ("it is 15", 0.0)])
async def test_the_pattern_pays_for_the_exact_answer(reply: str, reward: float) -> None:
    module = imported(PATTERN / "direct_episode.py")
    (task,) = load_tasks(PATTERN / "tasks.jsonl", module.AnswerTask)
    assert (await attempt(module.AnswerEpisode, task.value, replies=[reply])).reward == reward
