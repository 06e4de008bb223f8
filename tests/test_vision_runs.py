"""`ithaka train` on conversations with images and videos: tokens, pixels, a run on two ranks, and
its export."""

import errno
import json
import re
from types import SimpleNamespace

import numpy
import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText
from transformers.video_utils import VideoMetadata

from faults import moved
from ithaka.checkpoint.export import export
from ithaka.config import ConfigError, parse_config
from ithaka.data.documents.images import RecordImages
from ithaka.data.documents.pixels import _open_image
from ithaka.data.open import check_data, describe_data, open_data
from ithaka.data.tokenizer import load_tokenizer
from ithaka.evaluate.sample import sample
from ithaka.inputs.media import divide_frames
from ithaka.run.rules import check_settings
from ithaka.views.data import describe_sequence
from ithaka.views.record import describe_record, find_record, split_document
from runs import bitwise_metrics, copy_run_at_step, run
from vlms import model_for, picture, tiny_processor

VIDEOS = {1: 4, 5: 3, 7: 2}  # number of frames by conversation; all but the second are folders


def frames(n: int) -> list[int]:
    """Return the seeds of a video's frames, which all have the same size."""
    return [n % 6 + 6 * i for i in range(VIDEOS[n])]


def conversation(n: int) -> list[dict]:
    parts: list = [{"type": "image", "image": f"pictures/{n + i}.png"} for i in range(n % 3)]
    if n in VIDEOS:  # before the last image
        listed = [f"pictures/{seed}.png" for seed in frames(n)]
        parts.insert(
            len(parts) - 1, {"type": "video", "video": listed if n == 5 else f"clips/{n}", "fps": 4}
        )
    question = {
        "role": "user",
        "content": [*parts, {"type": "text", "text": f"What is number {n}?"}],
    }
    return [question, {"role": "assistant", "content": f"Picture {n}."}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model, its processor, and conversations with images."""
    folder = tmp_path_factory.mktemp("vlm")
    processor = tiny_processor()
    model_for(processor).save_pretrained(folder / "model")
    processor.tokenizer.chat_template = processor.chat_template
    processor.tokenizer.save_pretrained(folder / "model")
    processor.image_processor.save_pretrained(folder / "model")
    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    videos = sizes | {
        "size": {"shortest_edge": 64, "longest_edge": 4096},
        "cap_pixels_per_frame": False,
    }
    (folder / "model" / "video_preprocessor_config.json").write_text(json.dumps(videos))
    try:
        assert load_tokenizer(None, folder / "model").images is not None
    except ConfigError as error:
        if "without torchvision" in str(error):
            pytest.skip(str(error))
        raise
    pictures = folder / "data" / "pictures"
    pictures.mkdir(parents=True)
    for n in range(24):
        picture(n).save(pictures / f"{n}.png")
    for n in (1, 7):
        (folder / "data" / "clips" / str(n)).mkdir(parents=True)
        for i, seed in enumerate(frames(n)):
            picture(seed).save(folder / "data" / "clips" / str(n) / f"{i:03}.png")
    lines = [json.dumps({"messages": conversation(n)}) for n in range(10)]
    (folder / "data" / "talks.jsonl").write_text("\n".join(lines))
    return folder


def settings(folder, data=None, **train):
    reading = {
        "path": str(folder / "data" / "talks.jsonl"),
        "images": "read",
        "long_documents": "drop",
        "context": 240,
    }
    defaults = {"run_dir": str(folder / "run"), "steps": 4, "save_every": 2, "keep_last": 3}
    defaults |= {"validate_every": 3, "validate_sequences": 2}
    tree = {
        "model": {"path": str(folder / "model")},
        "data": {**reading, "validation_fraction": 0.2, **(data or {})},
    }
    return parse_config(
        {**tree, "optim": {"lr": 1e-2}, "train": {**defaults, **train}, "parallel": {"cp": 2}}
    )


def opened(folder, cp=(0, 1), **data):
    config = settings(folder, data).data
    tokenizer = load_tokenizer(None, folder / "model")
    return open_data(
        config, tokenizer=tokenizer, seed=1, cache_dir=folder / "cache", cp=cp
    ), tokenizer


def process(processor, n: int) -> dict:
    """Apply the processor to a conversation."""
    videos = (
        [torch.stack([pil_to_tensor(picture(seed)) for seed in frames(n)])] if n in VIDEOS else []
    )
    metadata = [
        {"total_num_frames": len(each), "fps": 4, "frames_indices": list(range(len(each)))}
        for each in videos
    ]
    text = tiny_processor().apply_chat_template(conversation(n), tokenize=False)
    options = (
        {"video_metadata": metadata, "do_sample_frames": False, "do_convert_rgb": False}
        if videos
        else {}
    )
    pictures = [picture(n + i) for i in range(n % 3)]
    return processor(
        images=pictures or None, videos=videos or None, text=[text], return_tensors="pt", **options
    )


def pil_to_tensor(image) -> torch.Tensor:
    return torch.from_numpy(numpy.asarray(image).copy()).permute(2, 0, 1)


def test_images_and_videos_have_the_tokens_and_pixels_of_the_processor(folder, monkeypatch):
    data, tokenizer = opened(folder, validation_fraction=0)
    pixels = {"pixel_values": [], "pixel_values_videos": []}
    summary = describe_data(data, 4)
    assert (summary["images"], summary["videos"]) == (
        str(sum(n % 3 for n in range(10))),
        str(len(VIDEOS)),
    )
    read = []
    monkeypatch.setattr(
        "ithaka.data.documents.pixels._open_image",
        lambda path: read.append(path) or _open_image(path),
    )
    batches = [data.next_batch() for _ in range(3)]
    for batch in batches:
        ends = (batch.document_ids[0].diff() != 0).nonzero()[:, 0].add(1).tolist()
        expected = {
            name: []
            for name in ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw")
        }
        for ids in batch.input_ids[0].tensor_split(ends):
            n = next((n for n in range(10) if f"number {n}?" in tokenizer.decode(ids)), None)
            if n is None:
                continue  # padding
            processed = process(tokenizer.images.processor, n)
            assert torch.equal(ids, processed["input_ids"][0])
            for name in expected.keys() & processed.keys():
                expected[name].append(processed[name])
        for name, parts in expected.items():
            assert (name in batch.images) == bool(parts)
            if parts:
                actual = batch.images[name]
                assert torch.equal(actual[:] if "pixel" in name else actual, torch.cat(parts)), name
                pixels.get(name, []).extend(parts)
    assert all(pixels.values())
    data.close()
    num_read = len(read)
    ranks = [opened(folder, cp=(rank, 3), validation_fraction=0)[0] for rank in range(3)]
    read.clear()
    for batch in batches:
        shares = [each.next_batch().images for each in ranks]
        full = batch.images
        grids = [full[name] for name in ("image_grid_thw", "video_grid_thw") if name in full]
        patches = torch.cat([grid[:, 1:].prod(1).repeat_interleave(grid[:, 0]) for grid in grids])
        ends = torch.nn.functional.pad(patches.cumsum(0), (1, 0))[
            divide_frames(patches, 3)
        ].tolist()
        for share, first, last in zip(shares, ends, ends[1:], strict=False):
            for name in ("pixel_values", "pixel_values_videos"):
                if name in full:  # images, then videos, as the model divides them
                    rows = slice(max(first, 0), max(last, 0))
                    assert torch.equal(share[name][rows], full[name][:][rows])
                    first = first - full[name].shape[0]
                    last = last - full[name].shape[0]
    for each in ranks:
        each.close()
    assert len(read) <= num_read, "a rank reads other ranks' frames"


def add_conversation(folder, name, content=None):
    """Write the data with one more conversation, whose image file has this content, and return its
    path."""
    talks = folder / "data" / f"{name}.jsonl"
    lines = [(folder / "data" / "talks.jsonl").read_text()]
    image = {"type": "image", "image": f"{name}.png"}
    lines.append(
        json.dumps({"messages": [{"role": "user", "content": [image]}, conversation(0)[1]]})
    )
    talks.write_text("\n".join(lines))
    if content is not None:
        (folder / "data" / f"{name}.png").write_bytes(content)
    return str(talks)


def test_unreadable_images_are_bad_records(folder):
    image = (folder / "data" / "pictures" / "1.png").read_bytes()
    for name, content in {
        "missing": None,
        "broken": image[: len(image) // 2],
        "text": b"no image",
    }.items():
        path = add_conversation(folder, name, content)
        with pytest.raises(ConfigError, match=f"{name}.png is (missing|broken)"):
            check_data(settings(folder, {"path": path}).data, 1000, folder / "model")
        data, _ = opened(folder, path=path, bad_records="skip", validation_fraction=0)
        assert describe_data(data, 4)["skipped"] == "1 document: 1 with images that cannot be read"
        data.close()


def test_storage_faults_do_not_make_a_record_bad(folder):
    def fail(path):
        raise OSError(errno.EIO, "Input/output error")

    record = RecordImages(
        SimpleNamespace(measure_image=fail), folder / "data", {"image": None, "video": None}
    )
    with pytest.raises(OSError, match="Input/output"):
        record.render({"type": "image", "image": "pictures/1.png"}, "message 1")


REFUSED = {
    "cut images": ({"long_documents": "split"}, "data.long_documents=split may cut an image"),
    "several samples": (
        {"reasoning": {"turns": "all"}},
        "cannot be combined with .* data.reasoning of all turns",
    ),
    "no reader": ({"images": "refuse"}, "set data.images to read for a vision-language model"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_are_refused(folder, case):
    changes, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        config = settings(folder, changes)
        check_settings(config)
        check_data(config.data, 1000, folder / "model")


def test_images_in_data_are_shown_as_a_summary(folder):
    config = settings(folder, {"validation_fraction": 0})
    tokenizer = load_tokenizer(None, folder / "model")
    # a video of 3 frames between two images
    (record,) = find_record(config, config.datasets, tokenizer, 6)
    ((_, turns),) = describe_record(record, config, tokenizer)[0]
    text = " ".join("".join(piece.text for piece in pieces) for _, pieces in turns)
    assert (
        re.findall("<(image|video): ", text) == ["image", "video", "video", "image"]
        and "_pad|>" not in text
    )
    sample = record.samples[0].tokens
    shown = sum(int(number) for number in re.findall(r": (\d+) tokens>", text))
    assert shown == sum(int((~sample == i).sum()) for i in tokenizer.images.ids.values())
    ids = [tokenizer.images.ids["image"]] * 900 + tokenizer.encode_batch(["a" * 300])[0].tolist()
    pieces = split_document(tokenizer, ids, numpy.zeros(len(ids), bool), 240, has_images=True)
    assert [pieces[0].text, len(pieces)] == [
        "<image: 900 tokens>",
        241,
    ] and "61 tokens omitted" in pieces[80].text
    data, _ = opened(folder, validation_fraction=0)
    data.stream.current_round()
    texts = [piece.text for _, pieces in describe_sequence(data, 0, 9, 240)[1] for piece in pieces]
    assert any(text.startswith("<image: ") for text in texts) and not any(
        "_pad|>" in text for text in texts
    )
    data.close()


def check_video(folder, video, **part):
    """Check data whose only conversation has this video."""
    part = {"type": "video", "video": video, **part}
    talk = {
        "messages": [
            {"role": "user", "content": [part]},
            {"role": "assistant", "content": "A" * 240},
        ]
    }
    (folder / "data" / "video.jsonl").write_text(json.dumps(talk))
    changes = {"path": str(folder / "data" / "video.jsonl"), "validation_fraction": 0}
    check_data(settings(folder, changes).data, 1000, folder / "model")


def test_unreadable_videos_are_refused(folder, monkeypatch):
    (folder / "data" / "mixed").mkdir()
    for n in (1, 2):
        picture(n).save(folder / "data" / "mixed" / f"{n}.png")
    (folder / "data" / "clip.mp4").write_bytes(b"no video")
    check_video(folder, "clips/1")
    for video, message in (
        ("clips/2", "clips/2 is missing"),
        (["pictures/1.png", "pictures/99.png"], "is missing"),
        ("mixed", "is broken .has frames of 2 sizes"),
        ("https://host/clip.mp4", "has the video https://host/clip.mp4; write a path"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_video(folder, video)
    monkeypatch.setattr("ithaka.data.documents.pixels.DECODERS", {"no_such_decoder": "pyav"})
    with pytest.raises(
        ConfigError, match="clip.mp4 is a video file, which needs a decoder; pip install no_such_"
    ):
        check_video(folder, "clip.mp4")


def test_a_video_file_is_sampled(folder, monkeypatch):
    """Replaces the decoder by one that returns pictures."""

    def load(path, backend, sample_indices_fn):
        metadata = VideoMetadata(24, fps=8.0)
        indices = sample_indices_fn(metadata=metadata)
        metadata.frames_indices = indices
        decoded.append([int(i) for i in indices])
        return numpy.stack([numpy.asarray(picture(6 * i)) for i in decoded[-1]]), metadata

    decoded: list = []
    monkeypatch.setattr("ithaka.data.documents.pixels.DECODERS", {"json": "json"})
    monkeypatch.setattr("ithaka.data.documents.pixels.load_video", load)
    reader = load_tokenizer(None, folder / "model").images
    text, video = reader.measure_video("clip.mp4", 2)
    assert (video.frames, decoded) == ([0, 5, 9, 14, 18, 23], [[23]])  # 6 frames from 3 seconds
    assert "<0.3 seconds>" in text and text.count("<|video_pad|>") == video.num_tokens
    parts = [reader.load([video], rank, 2)["pixel_values_videos"].part_PM for rank in range(2)]
    assert decoded[1:] == [[0, 5], [9, 14, 18, 23]]
    frames = torch.stack([pil_to_tensor(picture(6 * i)) for i in video.frames])
    expected = reader.processor.video_processor(
        videos=[frames], do_sample_frames=False, do_convert_rgb=False
    )
    assert torch.equal(torch.cat(parts), expected["pixel_values_videos"])


def test_a_run_is_resumed_and_exported(folder, ranks, tmp_path):
    config = settings(folder, steps=2, save_every=1, validate_every=2, validate_sequences=1)
    ranks.run(2, run, config)
    losses = bitwise_metrics(folder / "run")
    assert [row[0] for row in losses] == [0, 1, 2]
    again = moved(config, copy_run_at_step(config.train.run_dir, tmp_path / "again", 1))
    ranks.run(2, run, again, again.train.run_dir)
    assert bitwise_metrics(again.train.run_dir) == losses
    export(folder / "run", tmp_path / "out")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "out").eval()
    processor = AutoImageProcessor.from_pretrained(tmp_path / "out")
    assert (
        processor.patch_size == 4
        and (tmp_path / "out" / "video_preprocessor_config.json").is_file()
    )
    pixels = processor(images=[picture(1)], return_tensors="pt")
    config = model.config
    num_tokens = len(pixels["pixel_values"]) // 4
    ids = [
        config.vision_start_token_id,
        *[config.image_token_id] * num_tokens,
        config.vision_end_token_id,
        5,
    ]
    inputs = {
        "input_ids": torch.tensor([ids]),
        "mm_token_type_ids": torch.tensor([ids]) == config.image_token_id,
    }
    inputs["mm_token_type_ids"] = inputs["mm_token_type_ids"].long()
    with torch.no_grad():
        assert model(**inputs, **pixels).logits.isfinite().all()


def test_a_text_is_sampled_without_images(folder):
    assert isinstance(sample(folder / "model", "Hi", 2, 0.0), str)
