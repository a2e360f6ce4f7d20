import json
from pathlib import Path

import pytest

from loops_cookbook.errors import ModelError
from loops_cookbook.renderers.tokenizers import load_tokenizer, read_json


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_folder_with_a_tokenizer_json_is_read_as_it_stands(save_model, tmp_path):
    tokenizer = load_tokenizer(save_model(tmp_path), name="models/tiny")

    assert tokenizer.name == "models/tiny"
    assert (
        tokenizer.decode(tokenizer.encode("hello, ǹ 你好<|im_end|>")) == "hello, ǹ 你好<|im_end|>"
    )
    assert tokenizer.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|im_end|>"}
    assert tokenizer.end_ids == (tokenizer.id_of("<|im_end|>"),)
    assert tokenizer.template is not None
    assert "<|im_start|>" in tokenizer.template


def test_no_special_token_is_added_to_a_text(save_model, tmp_path):
    folder = save_model(tmp_path)
    begin, piece = {"id": "<|begin|>", "type_id": 0}, {"id": "A", "type_id": 0}
    processor = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": begin}, {"Sequence": piece}],
        "pair": [{"Sequence": piece}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [7], "tokens": ["<|begin|>"]}},
    }
    edit(folder / "tokenizer.json", post_processor=processor)

    tokenizer = load_tokenizer(folder)
    assert tokenizer.backend.encode("a").ids == [7, tokenizer.id_of("a")]
    assert tokenizer.encode("a") == [tokenizer.id_of("a")]


def test_truncation_and_padding_saved_with_a_tokenizer_do_not_touch_prompts(save_model, tmp_path):
    folder = save_model(tmp_path)
    edit(
        folder / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 99}, "direction": "Right", "pad_to_multiple_of": None,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "!",
        },
    )  # fmt: skip

    assert len(load_tokenizer(folder).encode("abcdef")) == 6


def test_a_template_file_wins_over_the_config(save_model, tmp_path):
    folder = save_model(tmp_path)
    (folder / "chat_template.jinja").write_text("own")

    assert load_tokenizer(folder).template == "own"


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "only", "template": "o"}], "o"),
        ([{"name": "a", "template": "a"}, {"name": "b", "template": "b"}], None),
        (None, None),
    ],
)
def test_of_named_templates_the_default_or_the_only_one_is_taken(
    save_model, tmp_path, named, expected
):
    folder = save_model(tmp_path)
    edit(folder / "tokenizer_config.json", chat_template=named)

    assert load_tokenizer(folder).template == expected


@pytest.mark.parametrize("declared", [258 + 8, [258 + 8, 262]])
def test_ends_of_text_that_the_generation_config_declares_come_after_the_eos_token(
    save_model, tmp_path, declared
):
    folder = save_model(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": declared}))
    tokenizer = load_tokenizer(folder)

    assert tokenizer.end_ids[0] == tokenizer.id_of("<|im_end|>")
    assert 258 + 8 in tokenizer.end_ids
    assert len(set(tokenizer.end_ids)) == len(tokenizer.end_ids)


def test_a_token_that_the_config_alone_declares_is_added_at_its_id(save_model, tmp_path):
    folder = save_model(tmp_path)
    new_id = load_tokenizer(folder).backend.get_vocab_size()
    added = {str(new_id): {"content": "<|new|>", "special": True, "normalized": False}}
    edit(folder / "tokenizer_config.json", added_tokens_decoder=added)

    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("a<|new|>") == [tokenizer.id_of("a"), new_id]
    assert new_id in tokenizer.atomic_ids()


def test_two_files_that_give_a_token_two_ids_are_refused(save_model, tmp_path):
    folder = save_model(tmp_path)
    edit(folder / "tokenizer_config.json", added_tokens_decoder={"7": {"content": "<|im_end|>"}})

    with pytest.raises(ModelError, match=r"gives '<\|im_end\|>' the id 7"):
        load_tokenizer(folder)


def test_a_broken_tokenizer_json_is_refused_by_its_path(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")

    with pytest.raises(ModelError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.slow  # imports transformers
@pytest.mark.timeout(120)
def test_a_folder_that_nobody_can_read_a_tokenizer_from_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')

    with pytest.raises(
        ModelError, match=r"^models/x: no tokenizer\.json in .*add a tokenizer\.json"
    ):
        load_tokenizer(tmp_path, name="models/x")


@pytest.mark.parametrize("text", ["[1]", "{"])
def test_a_config_that_is_not_an_object_is_refused_by_its_path(tmp_path, text):
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(ModelError, match=r"config\.json"):
        read_json(tmp_path / "config.json")


@pytest.mark.slow  # imports transformers
@pytest.mark.timeout(120)
def test_a_tokenizer_without_a_tokenizer_json_is_built_by_transformers(save_model, tmp_path):
    folder = save_model(tmp_path)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    edit(folder / "tokenizer_config.json", eos_token="<|im_end|>", tokenizer_class="GPT2Tokenizer")

    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("hello there")) == "hello there"
    assert len(tokenizer.encode("hello")) == 1


def test_a_config_that_is_not_there_is_empty(tmp_path):
    assert read_json(tmp_path / "config.json") == {}
