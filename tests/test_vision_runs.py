"""`ithaka train` on conversations with images: their tokens and pixels, a run on two ranks, and its export."""

import json

import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from faults import moved
from ithaka.config import ConfigError, parse_config
from ithaka.data.open import check_data, data_facts, open_data
from ithaka.data.tokenizer import load_tokenizer
from ithaka.export import export
from runs import copy_back_at, numbers, run
from vlms import model_for, picture, tiny_processor


def conversation(n: int) -> list[dict]:
    parts: list = [{"type": "image", "image": f"pictures/{n + i}.png"} for i in range(n % 3)]
    question = {"role": "user", "content": [*parts, {"type": "text", "text": f"What is number {n}?"}]}
    return [question, {"role": "assistant", "content": f"Picture {n}."}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with its processor, and conversations with images next to them."""
    folder, processor = tmp_path_factory.mktemp("vlm"), tiny_processor()
    model_for(processor).save_pretrained(folder / "model")
    processor.tokenizer.chat_template = processor.chat_template
    processor.tokenizer.save_pretrained(folder / "model")
    processor.image_processor.save_pretrained(folder / "model")
    (folder / "data" / "pictures").mkdir(parents=True)
    for n in range(12):
        picture(n).save(folder / "data" / "pictures" / f"{n}.png")
    lines = [json.dumps({"messages": conversation(n)}) for n in range(10)]
    (folder / "data" / "talks.jsonl").write_text("\n".join(lines))
    return folder


def settings(folder, data=None, **train):
    reading = {"path": str(folder / "data" / "talks.jsonl"), "images": "read", "long_documents": "drop", "context": 180}
    defaults = {"run_dir": str(folder / "run"), "steps": 4, "save_every": 2, "keep_last": 3}
    defaults |= {"validate_every": 3, "validate_sequences": 2}
    tree = {"model": {"path": str(folder / "model")}, "data": {**reading, "validation_fraction": 0.2, **(data or {})}}
    return parse_config({**tree, "optim": {"lr": 1e-2}, "train": {**defaults, **train}, "parallel": {"cp": 2}})


def opened(folder, **data):
    config = settings(folder, data).data
    tokenizer = load_tokenizer(None, folder / "model")
    return open_data(config, tokenizer=tokenizer, seed=1, cache_dir=folder / "cache"), tokenizer


def test_images_have_the_tokens_and_pixels_of_the_processor(folder):
    data, tokenizer = opened(folder, validation_fraction=0)
    processor, seen = tiny_processor(), 0
    facts = data_facts(data, 4)
    assert facts["images"] == str(sum(n % 3 for n in range(10)))
    batch = data.next_batch()
    ends = (batch.document_ids[0].diff() != 0).nonzero()[:, 0].add(1).tolist()
    for ids in batch.input_ids[0].tensor_split(ends):
        text = tokenizer.decode(ids)
        n = next((n for n in range(10) if f"number {n}?" in text), None)
        if n is None:
            continue  # padding
        pictures = [picture(n + i) for i in range(n % 3)]
        plain_text = processor.apply_chat_template(conversation(n), tokenize=False)
        wanted = processor(images=pictures or None, text=[plain_text], return_tensors="pt")
        assert torch.equal(ids, wanted["input_ids"][0])
        for pixels in [wanted["pixel_values"]] if pictures else []:
            assert torch.equal(batch.images["pixel_values"][seen : seen + len(pixels)], pixels)
            seen += len(pixels)
    assert seen == len(batch.images["pixel_values"]) > 0
    data.close()


def broken(folder, name, content=None):
    """A folder with one more conversation, whose image has this content."""
    talks = folder / "data" / f"{name}.jsonl"
    lines = [(folder / "data" / "talks.jsonl").read_text()]
    image = {"type": "image", "image": f"{name}.png"}
    lines.append(json.dumps({"messages": [{"role": "user", "content": [image]}, conversation(0)[1]]}))
    talks.write_text("\n".join(lines))
    if content is not None:
        (folder / "data" / f"{name}.png").write_bytes(content)
    return str(talks)


def test_unreadable_images_are_bad_records(folder):
    whole = (folder / "data" / "pictures" / "1.png").read_bytes()
    for name, content in {"missing": None, "broken": whole[: len(whole) // 2], "text": b"no image"}.items():
        path = broken(folder, name, content)
        with pytest.raises(ConfigError, match=f"{name}.png is (missing|broken)"):
            check_data(settings(folder, {"path": path}).data, 1000, folder / "model")
        data, _ = opened(folder, path=path, bad_records="skip", validation_fraction=0)
        assert data_facts(data, 4)["skipped"] == "1 documents: 1 with images that cannot be read"
        data.close()


REFUSED = {
    "cut images": ({"long_documents": "split"}, "data.long_documents=split may cut an image"),
    "several samples": ({"reasoning": {"turns": "all"}}, "cannot be combined with .* data.reasoning of all turns"),
    "no reader": ({"images": "refuse"}, "set data.images to read for a vision-language model"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_are_refused(folder, case):
    changes, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        check_data(settings(folder, changes).data, 1000, folder / "model")


def test_videos_are_refused(folder):
    part = {"type": "video", "video": "a.mp4"}
    talk = json.dumps({"messages": [{"role": "user", "content": [part]}, conversation(0)[1]]})
    (folder / "data" / "video.jsonl").write_text(talk)
    with pytest.raises(ConfigError, match="has a part of type video, which is not read; write frames as images"):
        changes = {"path": str(folder / "data" / "video.jsonl"), "validation_fraction": 0}
        check_data(settings(folder, changes).data, 1000, folder / "model")


def test_a_run_is_resumed_and_exported(folder, ranks, tmp_path):
    config = settings(folder)
    ranks.run(2, run, config, timeout_s=300)
    losses = numbers(folder / "run")
    assert [row[0] for row in losses] == [0, 1, 2, 3, 4]
    again = moved(config, copy_back_at(config.train.run_dir, tmp_path / "again", 2))
    ranks.run(2, run, again, again.train.run_dir, timeout_s=300)
    assert numbers(again.train.run_dir) == losses
    export(folder / "run", tmp_path / "out")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "out").eval()
    images = AutoImageProcessor.from_pretrained(tmp_path / "out")
    assert images.patch_size == 4
    pixels = images(images=[picture(1)], return_tensors="pt")
    config, num_tokens = model.config, len(pixels["pixel_values"]) // 4
    ids = [config.vision_start_token_id, *[config.image_token_id] * num_tokens, config.vision_end_token_id, 5]
    inputs = {"input_ids": torch.tensor([ids]), "mm_token_type_ids": torch.tensor([ids]) == config.image_token_id}
    inputs["mm_token_type_ids"] = inputs["mm_token_type_ids"].long()
    with torch.no_grad():
        assert model(**inputs, **pixels).logits.isfinite().all()
