"""Tests: parity with the original implementations, equations against naive loops, learning, files,
every README command."""
import ast
import collections
import contextlib
import copy
import csv
import errno
import functools
import hashlib
import http.server
import json
import math
import os
import pickle
import random
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
import torchvision.transforms.v2.functional as TF
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode
from torchvision import transforms as T
from torchvision.transforms import InterpolationMode

import beyond
import data
import ldc
import report
import run
import strategies

HERE = Path(__file__).parent

# Small tensors gain nothing from two threads; and runs in this process and in others repeat each
# other to the last bit.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
NEAREST = InterpolationMode.NEAREST
BILINEAR = InterpolationMode.BILINEAR
BICUBIC = InterpolationMode.BICUBIC


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def pictures(n=24, side=32, seed=0):
    """Smooth colour images with noise, saturated parts and one flat image, for every branch."""
    rng = np.random.RandomState(seed)
    y, x = np.mgrid[0:side, 0:side] / side
    waves = [np.sin(2 * np.pi * (rng.rand() * 2 * x + rng.rand() * 2 * y + rng.rand()))
             for _ in range(3 * n)]
    waves = 150 * rng.rand(n, 3, 1, 1) * np.array(waves).reshape(n, 3, side, side)
    images = 128 + waves + rng.normal(0, 12, (n, 3, side, side))
    images[-1] = 77
    images[-2, :, :, side // 2:] = 200
    return torch.from_numpy(images.clip(0, 255).astype(np.uint8))


@pytest.fixture(scope="module")
def demo():
    return data.load("demo")


def make_dataset(name, n_classes=2, n=4):
    """Generated pixels in the stored form of a real data set: its pipelines without its files."""
    def split(form, seed):
        stored = np.zeros((n_classes * n, *form.shape), np.uint8)
        stored[:, :, :form.side] = pictures(n_classes * n, form.side, seed)
        if form.fit == "photo":
            stored[:, :, -1, :4] = 375 // 256, 375 % 256, 500 // 256, 500 % 256
        return torch.from_numpy(stored).split(n)

    spec = data.DATASETS[name]
    names = [f"c{i}" for i in range(n_classes)]
    clean = split(spec.test, 2) if spec.test else None
    return data.Dataset(name, names, split(spec.train, 0), split(spec.test or spec.train, 1), clean)


# --------------------------------------------------------------------------------------------------
# Data: augmentations

SPACE = T.AutoAugment(T.AutoAugmentPolicy.CIFAR10)._augmentation_space(10, (32, 32))


def reference_op(image, op, m):
    """torchvision's own operation on one uint8 image."""
    m = m / 255 if op == "Solarize" else m  # there a share of the range
    work = torchvision.transforms.v2.AutoAugment()._apply_image_or_video_transform
    return work(image, op, m, NEAREST, {torch.Tensor: [128.0] * 3})


@pytest.mark.parametrize("op", data.OPERATIONS)
def test_autoaugment_operations_equal_torchvision(op):
    magnitudes, signed = SPACE[op]
    images, members = pictures(), torch.tensor([22, 3, 15, 8, 23])
    for value in magnitudes.view(-1).tolist():
        for m in (value, -value) if signed else (value,):
            steps = [[(op, m, members)], [("Invert", 0, members)]]
            ours = data.apply_autoaugment(images.clone(), steps)
            theirs = images.clone()
            for i in members.tolist():
                theirs[i] = TF.invert(reference_op(images[i], op, m))
            assert torch.equal(ours, theirs)


def test_autoaugment_draws_match_the_policy():
    n = 40000
    for k, step in enumerate(data.draw_autoaugment(n, 32, gen())):
        counts, expected = collections.Counter(), collections.Counter()
        for op, value, members in step:
            counts[op, value] += len(members)
        for pair in data.POLICY:
            op, chance, index = pair[k]
            magnitudes, signed = SPACE[op]
            value = 0 if index is None else magnitudes[index].item()
            for sign in (1, -1) if signed else (1, 1):
                expected[op, sign * value] += chance * n / 50
        for key, mean in expected.items():
            assert abs(counts[key] - mean) < 5 * math.sqrt(mean) + 1, (k, key)
        assert set(counts) <= set(expected)


def mirror(image, flip):
    return TF.hflip(image) if flip else image


def test_cifar_pipeline_equals_torchvision():
    transform, images = data.Transform("cifar100"), pictures()
    plan = transform.draw_augment(24, gen(1))
    plan["autoaugment"] = [[], []]
    for i, ours in enumerate(transform.apply_augment(images, plan)):
        top, left = plan["corner"][:, i].tolist()
        image = TF.crop(TF.pad(images[i], [4, 4, 4, 4]), top, left, 32, 32)
        image = TF.adjust_brightness(mirror(image, plan["flip"][i]), plan["brightness"][i].item())
        theirs = TF.normalize(image / 255, list(transform.mean), list(transform.std))
        assert (ours - theirs).abs().max() < 2e-5
    draws = transform.draw_augment(5000, gen(2))
    low, high = draws["brightness"].aminmax()
    assert (low.item(), high.item()) == pytest.approx((1 - 63 / 255, 1 + 63 / 255), abs=1e-3)
    assert set(draws["corner"].unique().tolist()) == set(range(9))
    assert abs(draws["flip"].float().mean() - 0.5) < 0.03


def test_augmentations_are_several_times_as_fast_as_pillow(capsys):
    data.measure_views("cpu", pictures(1024))
    augment, views = re.findall(r"([\d.]+) times", capsys.readouterr().out)
    assert float(augment) > 5 and float(views) > 2


def sizes(n, height, width):
    return torch.tensor([[height, width]]).float().expand(n, 2)


@pytest.mark.parametrize("cubic", [False, True])
def test_resized_crop_equals_torchvision_for_any_box(cubic):
    images = pictures(16, 64)
    boxes = data.place_boxes(data.draw_boxes(16, (0.08, 1.0), gen()), sizes(16, 64, 64))
    flip = torch.arange(16) % 2 == 1
    ours = data.resized_crop(images, boxes, 32, cubic, flip)  # some boxes are smaller
    for i, box in enumerate(boxes.int().tolist()):
        mode = BICUBIC if cubic else BILINEAR
        theirs = TF.resized_crop(images[i].float(), *box, [32, 32], mode)
        assert (ours[i] - mirror(theirs, flip[i])).abs().max() < 0.02, box


def test_crop_boxes_have_torchvisions_spread():
    n = 4000
    boxes = data.place_boxes(data.draw_boxes(n, (0.08, 1.0), gen()), sizes(n, 36, 24))
    torch.manual_seed(0)
    draw = functools.partial(T.RandomResizedCrop.get_params, ratio=[3 / 4, 4 / 3])
    image = torch.zeros(3, 36, 24)
    theirs = torch.tensor([draw(image, [0.08, 1.0]) for _ in range(n)]).float()
    assert (boxes >= 0).all() and torch.equal(boxes, boxes.round())
    assert (boxes[:, :2] + boxes[:, 2:] <= torch.tensor([36, 24])).all()
    columns = ([*b.unbind(1), b[:, 2] * b[:, 3], b[:, 2] / b[:, 3]] for b in (boxes, theirs))
    for a, b in zip(*columns):  # top, left, height, width, area and aspect ratio
        assert abs(a.mean() - b.mean()) < 5 * b.std() / math.sqrt(n / 2)
        assert abs(a.std() - b.std()) < 0.06 * b.std()
    never = data.draw_boxes(1, (2.0, 3.0), gen())  # where no try fits: the largest centre
    for size in ((100, 400), (401, 100)):
        theirs = draw(torch.zeros(3, *size), [2.0, 3.0])
        assert data.place_boxes(never, sizes(1, *size))[0].tolist() == list(theirs)


def test_crops_of_a_photograph_equal_torchvisions(tmp_path):
    y, x = np.mgrid[0:375, 0:500] / 2  # smooth: detail beyond the stored 300 pixels is lost
    photo = Image.fromarray(np.stack([x, y, 250 - x], 2).astype(np.uint8))
    photo.save(tmp_path / "a.png")
    transform = data.Transform("imagenet100")
    stored = torch.from_numpy(data.decode(tmp_path / "a.png", transform.spec.train))
    plan = transform.draw_augment(16, gen(1))
    boxes = data.place_boxes(plan["crop"], sizes(16, 375, 500)).int().tolist()
    ours = transform.apply_augment(stored.expand(16, -1, -1, -1), plan)
    mean, std = torch.tensor([transform.mean, transform.std]).view(2, 3, 1, 1) * 255
    for image, box, flip in zip(ours, boxes, plan["flip"]):
        theirs = TF.pil_to_tensor(TF.resized_crop(photo, *box, [224, 224], BILINEAR))
        difference = (image * std + mean - mirror(theirs, flip)).abs()
        assert difference.mean() < 0.5 and difference.max() < 2, box


def test_the_steps_of_a_view_equal_torchvision(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "index_copy_", None)  # Apple's GPUs have no kernel for it
    images = pictures()
    low, high = torch.tensor([[0.2, 0.2, 0.2, -0.2], [1.8, 1.8, 1.8, 0.2]])
    factors = low + (high - low) * torch.rand(24, 4, generator=gen())
    factors[:4] = torch.tensor([1, 1, 1, 0])
    whole = torch.ones(24, 10), torch.ones(24, 10), torch.zeros(24, 2)
    plan = {"crop": whole, "flip": torch.zeros(24, dtype=torch.bool), "blur": [],
            "jitter": factors, "group": 12, "orders": [[0, 1, 2, 3], [3, 2, 1, 0]],
            "grey": torch.tensor([0]), "equalise": torch.tensor([1]),
            "solarise": torch.tensor([2, 3]), "threshold": torch.tensor([127.5, 60.5])}
    ours = data.apply_view(images, plan, data.View(32))
    jitter = [TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation, TF.adjust_hue]
    others = [TF.rgb_to_grayscale(images[0].float(), 3), TF.equalize(images[1]),
              TF.solarize(images[2], 127.5), TF.solarize(images[3], 60.5)]
    for i in range(24):
        theirs = images[i] / 255
        for op in plan["orders"][i // 12]:
            theirs = jitter[op](theirs, factors[i, op].item())
        theirs = others[i] if i < 4 else 255 * theirs
        assert (ours[i] - theirs).abs().max() < 0.05, i
    big, sigma = pictures(3, 224).float(), torch.tensor([0.1, 0.8, 2.0])
    for x, s, ours in zip(big, sigma, data.gaussian_blur(big, sigma)):
        assert (ours - TF.gaussian_blur(x, [23, 23], [s.item()] * 2)).abs().max() < 1e-2


def test_view_recipes_are_the_papers():
    View = data.View
    twins = {"cubic": True, "jitter": (0.4, 0.4, 0.2, 0.1)}
    cifar = {"grey": 0, "solarise": 0.2, "threshold": (0, 256), "equalise": 0.2}
    imagenet = {"jitter": (0.8, 0.8, 0.8, 0.2), "blur": 0.5}
    mild = View(32, (0.3, 1.0), grey=0)
    assert View(32) == View(32, (0.08, 1.0), False, (0.4, 0.4, 0.4, 0.1), 0.2, 0, 0, (128, 128), 0)
    for recipe, size, *expected in (
            ("asymmetric", 32, View(32, **twins), View(32, **twins, solarise=0.2)),
            ("asymmetric", 224, View(224, **twins, blur=1),
             View(224, **twins, blur=0.1, solarise=0.2)),
            ("symmetric", 32, *[View(32)] * 2), ("symmetric", 64, *[View(64, blur=0.5)] * 2),
            ("mild", 32, mild, mild), ("crops", 32, *[data.replace(mild, jitter=(0,) * 4)] * 2),
            ("multi", 32, *[View(32, (0.75, 1.0), **cifar)] * 2,
             *[View(18, (0.3, 0.75), **cifar)] * 2),
            ("multi", 224, *[View(224, (0.14, 1.0), **imagenet)] * 2,
             *[View(96, (0.05, 0.14), **imagenet)] * 2)):
        assert list(data.view_recipes(recipe, size)) == expected, (recipe, size)


def test_view_draws_have_their_frequencies():
    view = data.View(32, jitter=(0.4, 0.4, 0.2, 0.1), grey=0.2, blur=0.5, solarise=0.2,
                     threshold=(0, 256), equalise=0.1)
    plan = data.draw_view(20000, view, gen())
    jittered = (plan["jitter"] != torch.tensor([1.0, 1, 1, 0])).any(1)
    parts = [*(len(plan[step]) for step in ("grey", "blur", "solarise", "equalise")),
             jittered.sum().item(), plan["flip"].sum().item()]
    assert [n / 20000 for n in parts] == pytest.approx([0.2, 0.5, 0.2, 0.1, 0.8, 0.5], abs=0.02)
    for step, ends in (("jitter", [[0.6, 0.6, 0.8, -0.1], [1.4, 1.4, 1.2, 0.1]]),
                       ("sigma", [0.1, 2.0]), ("threshold", [0, 256])):
        found = torch.stack(plan[step].aminmax(dim=0))
        assert (found - torch.tensor(ends)).abs().max() < 2e-3 * plan[step].max(), step
    plans = [data.draw_view(512, view, gen(seed)) for seed in range(30)]
    assert len({tuple(order) for plan in plans for order in plan["orders"]}) == 24


def test_rotate4_is_image_major_and_counter_clockwise():
    turned = data.rotate4(torch.arange(8).view(2, 1, 2, 2)).flatten(1).tolist()
    assert turned[:4] == [[0, 1, 2, 3], [1, 3, 0, 2], [3, 2, 1, 0], [2, 0, 3, 1]]
    assert turned[4] == [4, 5, 6, 7]


def test_clean_transforms_equal_torchvision(tmp_path):
    picture = save(tmp_path / "a.png", size=(411, 300))
    for name, mode in (("imagenet100", BILINEAR), ("cars", BICUBIC)):
        transform = data.Transform(name)
        theirs = T.Compose([T.Resize(256, mode), T.CenterCrop(224), T.ToTensor(),
                            T.Normalize(transform.mean, transform.std)])(picture)
        ours = transform.clean(transform.decode(tmp_path / "a.png")[None])
        assert (ours[0] - theirs).abs().max() < 1e-5, name
    squashed = data.decode(tmp_path / "a.png", data.DATASETS["cars"].train)
    theirs = np.asarray(picture.resize((300, 300), Image.BICUBIC))
    assert np.array_equal(squashed.transpose(1, 2, 0), theirs)
    mean, std = np.array([transform.mean, transform.std])
    assert transform.pixel_range == pytest.approx([(-mean / std).min(), ((1 - mean) / std).max()])


@pytest.mark.parametrize("name", data.DATASETS)
def test_pipelines_are_reproducible_and_spare_their_input(name):
    dataset = make_dataset(name, n=1 if name in ("cars", "imagenet100") else 4)
    images = torch.cat([dataset.train_images(0), dataset.train_images(1)])
    before, size = images.clone(), dataset.image_size
    for call in (dataset.augment, lambda x, g: dataset.two_views(x, g)[1],
                 lambda x, g: dataset.multi_crop(x, g, small=False)[-1]):
        a, b, c = call(images, gen(5)), call(images, gen(5)), call(images, gen(6))
        assert a.shape == (len(images), 3, size, size)
        assert torch.equal(a, b) and not torch.equal(a, c) and torch.equal(images, before)
        assert a.abs().max() < 4.5
    one, two = dataset.two_views(images, gen(), "symmetric")
    assert not torch.equal(one, two)


def skip_where_cuda_cannot_be_faked():
    try:
        with torch._subclasses.fake_tensor.FakeTensorMode():
            torch.empty(1).to("cuda")
    except RuntimeError:
        pytest.skip("torch 2.5 asks the driver before it fakes CUDA")


@pytest.mark.parametrize("name", ["cifar100", "imagenet100"])
def test_pipelines_stay_on_the_device(name):
    """Fake CUDA tensors raise where two devices mix; only the drawn plan is moved."""
    dataset = make_dataset(name)
    views = [view for recipe in ("asymmetric", "multi")
             for view in data.view_recipes(recipe, dataset.image_size)]
    inputs = [data.draw_view(32, view, gen(seed)) for seed, view in enumerate(views)]
    inputs.append(dataset.draw_augment(32, gen()))
    inputs.append(dataset.train_images(0)[:1].expand(32, -1, -1, -1))
    skip_where_cuda_cannot_be_faked()
    with torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        *plans, augment, images = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda tensor: mode.from_tensor(tensor).to("cuda"), inputs)
        outputs = [data.apply_view(images, plan, view) for plan, view in zip(plans, views)]
        outputs.append(dataset.apply_augment(images, augment))
        assert all(output.device.type == "cuda" for output in outputs)


def test_an_epoch_on_cuda_is_augmented_in_one_call(monkeypatch):
    """A call makes 58 copies that wait: 58 for the 5,000 images of a task, not 290."""
    monkeypatch.setitem(data.CHUNK, "cpu", data.CHUNK["cuda"])
    images, calls = torch.zeros(5000, 3, 32, 32, dtype=torch.uint8), []
    task = data.Task(make_dataset("cifar100"), 0, range(1), images, images, torch.zeros(5000), [0])
    batches = task.epoch(128, gen(), augment=lambda x, generator: calls.append(x) or x)
    assert len(list(batches)) == 40 and len(calls) == 1


def test_views_need_no_kernel_that_mps_lacks(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "index_copy_", None)
    dataset = make_dataset("cifar100")
    for call in (dataset.augment, dataset.two_views, dataset.multi_crop):
        call(dataset.train_images(0), gen())


def test_pooling_on_mps_is_done_by_the_cpu(monkeypatch):
    """MPS raises where 32 is no divisor of the size."""
    class OnMps(torch.Tensor):
        device = torch.device("mps")

        def cpu(self):
            return self.as_subclass(torch.Tensor)

    def pool(x, size, pool=F.adaptive_avg_pool2d):
        assert not isinstance(x, OnMps)
        return pool(x, size)

    x = torch.rand(2, 3, 48, 48)
    right = beyond.at_most_32(x)
    monkeypatch.setattr(F, "adaptive_avg_pool2d", pool)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, device: x)
    assert torch.equal(beyond.at_most_32(x.as_subclass(OnMps)), right)


# --------------------------------------------------------------------------------------------------
# Data: tasks


def test_task_sizes():
    for arguments, expected in (((196, 10), [20] * 9 + [16]), ((12, 7), [1] * 6 + [6]),
                                ((100, 11, 50), [50] + [5] * 10), ((3, 3), [1] * 3)):
        assert data.task_sizes(*arguments) == expected
    for bad, words in (((5, 6), "set --tasks"), ((5, 0), "set --tasks"), ((9, 6, 8), "set --tasks"),
                       ((10, 3, 10), "--first-classes"), ((10, 1, 5), "--first-classes"),
                       ((10, 3, 0), "--first-classes")):
        with pytest.raises(data.UserError, match=words):
            data.task_sizes(*bad)


def test_stream_hands_out_the_right_images_and_labels(demo):
    stream = data.TaskStream(demo, tasks=10, seed=1996)
    assert stream.class_names == [demo.class_names[c] for c in data.class_order(50, 1996)]
    task = stream.task(3)
    assert task.classes == range(15, 20) and len(task) == 1000
    for label in task.classes:
        images = task.images[task.labels == label]
        assert torch.equal(images, demo.train_images(stream.class_order[label]))
    assert task.clean_images is task.images
    assert torch.equal(task[[7, 3]], demo.clean(task.images[[7, 3]]))
    tests = list(stream.test(2))
    assert torch.equal(tests[1][0][:40], demo.test_images(stream.class_order[5]))
    assert torch.cat([labels for _, labels in tests]).unique().tolist() == list(range(15))
    assert next(stream.test(2))[0] is tests[0][0]


def test_finished_tasks_stay_behind_the_door(demo):
    stream = data.TaskStream(demo, tasks=5)
    stream.task(0)
    assert stream.task(2) is stream.task(2)
    with pytest.raises(RuntimeError):
        stream.task(1)
    with pytest.raises(RuntimeError):
        stream.reopen_finished_tasks(1, "lwf")
    assert not any(stream.opened.values())
    reopened = list(stream.reopen_finished_tasks(1, "oracle"))
    assert [task.index for task in reopened] == [0, 1]
    assert stream.opened == {"oracle": 1, "joint": 0}
    assert torch.equal(reopened[1].images[:200], demo.train_images(stream.class_order[10]))


def test_merged_tasks_are_copied_once(monkeypatch):
    stream = data.TaskStream(make_dataset("imagenet100", n_classes=5, n=2), tasks=5)
    last = stream.task(2)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", lambda *a, **k: pytest.fail("a second copy"))
        merged = stream.merged(2)
    assert merged.labels.tolist() == [0, 0, 1, 1, 2, 2] and merged.index == 2
    assert stream.opened == {"oracle": 0, "joint": 1}
    some = merged.subset(torch.tensor([5, 4]))
    assert some.labels.tolist() == [2, 2]
    assert torch.equal(some.images, last.images[[1, 0]])
    assert torch.equal(some[:], some.clean(last.clean_images[[1, 0]]))


def test_labelled_subsets_are_balanced_and_nested():
    images = torch.zeros(4, 500, 3, 4, 4, dtype=torch.uint8)
    dataset = data.Dataset("cifar100", list("abcd"), images, images)
    task = data.TaskStream(dataset, tasks=2, seed=3).task(1)
    before = set()
    for share, each in ((0.0001, 1), (0.05, 25), (1.0, 500)):
        index, labels = task.labelled(share, seed=7)
        assert torch.equal(labels, task.labels[index])
        assert labels.bincount().tolist() == [0, 0, each, each]
        assert before < set(index.tolist())
        before = set(index.tolist())
    index, _ = task.labelled(0.05, 7)
    assert not torch.equal(task.labelled(0.05, 8)[0], index)
    assert not torch.equal(index[:25], index[25:] - 500)  # each class by itself
    hidden = task.without_labels()
    assert torch.equal(hidden.labelled(0.0, 7, count=25)[0], index)
    for read in (lambda: hidden.subset(index).labels,
                 lambda: next(hidden.epoch(8, augment=lambda x, g: x))):
        with pytest.raises(RuntimeError, match="no labels"):
            read()


@pytest.mark.parametrize("chunk", [1, data.CHUNK["cpu"]])  # batch by batch, several in one call
@pytest.mark.parametrize("n,batches", [(1, [2]), (9, [8, 2]), (8, [8]), (20, [8, 8, 4])])
def test_an_epoch_has_every_image_and_a_batch_of_one_has_it_twice(
        n, batches, chunk, demo, monkeypatch):
    def pairs(images, labels):
        return [(image.numpy().tobytes(), label) for image, label in zip(images, labels.tolist())]

    monkeypatch.setitem(data.CHUNK, "cpu", chunk)
    task = data.TaskStream(demo, tasks=10).task(0).subset(torch.arange(n) * 50)
    epoch = list(task.epoch(8, gen(), augment=lambda x, g: x))
    assert [len(x) for x, _ in epoch] == batches
    seen = [pair for batch in epoch for pair in pairs(*batch)]
    expected = pairs(task.images, task.labels)
    assert set(seen) == set(expected) and (seen != expected or n == 1)
    assert len(list(task.epoch(8, gen(), drop_last=True))) == n // 8
    assert [len(x) for x, _ in task.epoch(1, gen(), drop_last=True)] == [2] * n
    crops, labels = next(task.epoch(8, gen(), augment=task.multi_crop))
    assert [crop.shape[::3] for crop in crops] == [(len(labels), s) for s in (16, 16, 9, 9)]
    again = [list(task.without_labels().epoch(8, gen(4), with_labels=False)) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*again))


def test_demo_is_deterministic_without_doubles(demo):
    one, two = (data.demo_images.__wrapped__(4)[1] for _ in range(2))
    assert torch.equal(one, two)
    images = [of_split(c) for c in range(50) for of_split in (demo.train_images, demo.test_images)]
    assert len({image.numpy().tobytes() for image in torch.cat(images)}) == 12000


# --------------------------------------------------------------------------------------------------
# Data: files, caches and what a user can get wrong


def save(path, seed=0, size=(20, 16)):
    """Write a picture of noise and return it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.RandomState(seed).randint(0, 256, (*size[::-1], 3), np.uint8)
    picture = Image.fromarray(noise)
    picture.save(path)
    return picture


def make_tree(root, classes=("ant", "bee", "cat"), train=4, test=2, held_out="test"):
    for k, name in enumerate(classes):
        for i in range(train):
            save(root / "train" / name / f"{i}.png", 100 * k + i)
        for i in range(test):
            save(root / held_out / name / f"{i}.png", 100 * k + 50 + i)
    return root


def load_folder(root, **options):
    return data.load("folder", root, **{"image_size": 16, **options})


def counts(dataset):
    return [[len(images(c)) for c in range(dataset.num_classes)]
            for images in (dataset.train_images, dataset.test_images)]


def equal(one, two):
    """Whether two data sets have the same classes, pixels and fingerprint."""
    assert (one.class_names, one.fingerprint) == (two.class_names, two.fingerprint)
    return all(torch.equal(a(c), b(c)) for c in range(one.num_classes) for a, b in (
        (one.train_images, two.train_images), (one.test_images, two.test_images)))


def test_plain_class_folders_are_split_by_the_names_of_their_files(tmp_path):
    names = [f"{i}.png" for i in range(10)]
    for i, name in enumerate(names):
        save(tmp_path / "ant" / name, i)
        save(tmp_path / "bee" / name, 50 + i)
    tests = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())[:2]
    _, *splits = data.find_by_class(tmp_path, (".",))
    for split, expected in zip(splits, (set(names) - set(tests), set(tests))):
        assert [{Path(path).name for path in of_class} for of_class in split] == [expected] * 2
    save(tmp_path / "cat" / "0.png")
    with pytest.raises(data.UserError, match="cat holds one image: expected at least two"):
        load_folder(tmp_path)
    save(tmp_path / "cat" / "1.png")
    assert counts(load_folder(tmp_path)) == [[8, 8, 1], [2, 2, 1]]


def test_images_with_a_palette_or_16_bits_are_decoded(tmp_path):
    grey = Image.new("RGB", (20, 16), (204, 204, 204))  # 204: in the web palette
    grey.convert("P").save(tmp_path / "palette.png")
    assert (data.decode(tmp_path / "palette.png", data.Form(16)) == 204).all()
    Image.fromarray(np.full((9, 9), 200 * 256, np.uint16)).save(tmp_path / "deep.png")
    assert (data.decode(tmp_path / "deep.png", data.Form(9)) == 200).all()  # scaled, not clipped


def test_cache_is_used_and_notices_changes(tmp_path, monkeypatch):
    make_tree(tmp_path)
    first = load_folder(tmp_path).train_images(0).clone()
    count, decode = [], data.decode
    monkeypatch.setattr(data, "decode", lambda path, form: count.append(path) or decode(path, form))
    load_folder(tmp_path).train_images(0).zero_()  # copy on write: the file does not change
    assert torch.equal(load_folder(tmp_path).train_images(0), first) and not count
    assert load_folder(tmp_path, image_size=24).train_images(0).shape[-1] == 24
    file, nines = ant(tmp_path, 0), Image.new("RGB", (20, 16), (9, 9, 9))
    for change in (lambda: nines.save(file), lambda: os.utime(file, (1, 1)),
                   lambda: save(ant(tmp_path, 7)), file.unlink):
        count.clear()
        change()
        images = load_folder(tmp_path).train_images(0)
        assert count and (images[0] == 9).all() == file.exists()
    count.clear()
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    load_folder(moved)
    assert not count  # a folder that moved is not decoded again
    for size in (1000, 0):
        for cache in (moved / ".cache").iterdir():
            os.truncate(cache, size)
        with pytest.raises(data.UserError, match="cache/folder-train-.* is damaged: delete it"):
            load_folder(moved)


def test_two_processes_decode_at_once(tmp_path):
    make_tree(tmp_path, train=20)
    with data.ThreadPoolExecutor(4) as pool:  # threads stand in for processes
        loaded = list(pool.map(load_folder, [tmp_path] * 4))
    assert all(equal(one, loaded[0]) for one in loaded)
    assert len(list((tmp_path / ".cache").iterdir())) == 2


def test_a_lock_is_held_once_and_may_be_missing(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOSYS, "not on this file system")

    with data.locked(tmp_path / "lock"):
        with pytest.raises(BlockingIOError):
            with data.locked(tmp_path / "lock"):  # another open file is as another process
                pass
        monkeypatch.setattr(data.fcntl, "flock", no_locks)
        with data.locked(tmp_path / "lock"):
            pass


def test_an_interrupted_decode_leaves_nothing(tmp_path, monkeypatch):
    def stop(path, form):
        raise error

    make_tree(tmp_path)
    for folder in (tmp_path, tmp_path / ".cache"):  # of a process that was killed
        save(folder / "unfinished-x" / "1.png")
    monkeypatch.setattr(data, "decode", stop)
    for error, seen in ((OSError(28, "No space"), data.UserError),
                        (KeyboardInterrupt("No space"), KeyboardInterrupt)):
        with pytest.raises(seen, match="No space"):
            load_folder(tmp_path)
        assert not list(tmp_path.rglob("unfinished-*")) + list((tmp_path / ".cache").iterdir())


def test_fingerprint_is_that_of_the_images(tmp_path):
    first = load_folder(make_tree(tmp_path / "a")).fingerprint
    copy = make_tree(tmp_path / "b")
    os.utime(ant(copy), (1, 1))
    assert load_folder(copy, limit=1).fingerprint == first
    for change in (lambda: save(copy / "test" / "cat" / "0.png", 3),
                   lambda: (copy / "train" / "bee" / "0.png").rename(ant(copy, 9)),  # the counts
                   lambda: [(copy / part / "cat").rename(copy / part / "dog")
                            for part in ("train", "test")]):
        before = load_folder(copy).fingerprint
        change()
        assert load_folder(copy).fingerprint != before


def ant(root, i=1):
    return root / "train" / "ant" / f"{i}.png"


def link(path, target):
    path.unlink(missing_ok=True)
    path.symlink_to(target)


SPOILT = {  # what is wrong: (how it came about, what the sentence says)
    "no test": (lambda r: (r / "test").rename(r / "hidden"), "val/ant holds no image .* or val"),
    "class in test only": (lambda r: save(r / "test" / "dog" / "1.png"), "train/dog holds no"),
    "half an image": (lambda r: os.truncate(ant(r), 200), "cannot read .*1.png"),
    "dangling link": (lambda r: link(ant(r), "nowhere.png"), "No such file .*1.png"),
    "60000 x 1 pixels": (lambda r: Image.new("RGB", (60000, 1)).save(ant(r)), "60000 x 1 pixels"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_bad_folder_is_one_sentence_and_stays(what, tmp_path):
    root = make_tree(tmp_path / "data")
    spoil, words = SPOILT[what]
    spoil(root)
    before = sorted(root.rglob("*.*g"))
    with pytest.raises(data.UserError, match=words) as info:
        data.load("folder", root)
    error = str(info.value)
    assert error.endswith(".") and "\n" not in error
    assert sorted(root.rglob("*.*g")) == before


def test_odd_but_good_folders_work(tmp_path):
    root = make_tree(tmp_path / "data")
    folder = root / "train" / "ant"
    os.rename(folder / "1.png", os.fsencode(folder) + b"/\xff.png")  # a name that is not UTF-8
    link(ant(root, 2), ant(root, 2).rename(tmp_path / "elsewhere.png"))
    link(folder / "loop", "..")  # links to folders are not followed inside a class
    (folder / ".hidden.png").write_bytes(b"")
    (folder / "notes.txt").write_text("")
    (root / "train" / ".trash").mkdir()
    link(root / "train" / "bee", (root / "train" / "bee").rename(tmp_path / "bees"))
    for split in ("train", "test"):
        os.rename(root / split / "cat", os.fsencode(root / split) + b"/cat\xff")
    dataset = load_folder(root)
    assert counts(dataset)[0] == [4, 4, 4]
    assert dataset.class_names == ["ant", "bee", "cat\ufffd"]


def test_bad_arguments_are_one_sentence(tmp_path):
    for name, size, sentence in (
            ("folder", 7, "--image-size 7"), ("folder", 1025, "--image-size 1025"),
            ("cifar100", 64, "--image-size 64 with --dataset cifar100"),
            ("cars", None, "stanford_cars/train/<class> holds no image")):
        with pytest.raises(data.UserError, match=sentence):
            data.load(name, tmp_path, image_size=size)


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """torchvision's layout and checksums: twelve training images, six of them tests."""
    images = np.random.RandomState(0).randint(0, 256, (12, 3, 32, 32)).astype(np.uint8)
    contents = {"meta": {"fine_label_names": ["apple", "bear", "crab"]}}
    for part, n in (("train", 12), ("test", 6)):
        contents[part] = {"data": images[:n].reshape(n, -1), "fine_labels": ([2, 0, 1] * 4)[:n]}
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    sums = {}
    for part, content in contents.items():
        (folder / part).write_bytes(pickle.dumps(content))
        sums[part] = hashlib.md5(pickle.dumps(content)).hexdigest()
    for name, value in (("train_list", [["train", sums["train"]]]),
                        ("test_list", [["test", sums["test"]]]),
                        ("meta", {**data.CIFAR100.meta, "md5": sums["meta"]}),
                        ("url", (folder / "absent.tar.gz").as_uri())):  # no network
        monkeypatch.setattr(data.CIFAR100, name, value)
    return images


def test_cifar100_is_the_same_from_pickles_and_folders(cifar, tmp_path, capsys):
    pickles = data.load("cifar100", tmp_path)
    for split, count in (("train", 12), ("test", 6)):
        for i in range(count):
            path = tmp_path / "cifar100" / split / ("crab", "apple", "bear")[i % 3] / f"{i:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            TF.to_pil_image(torch.from_numpy(cifar[i])).save(path)
    assert equal(pickles, data.load("cifar100", tmp_path))
    assert counts(pickles) == [[4] * 3, [2] * 3]
    assert "3 of 100 classes found" in capsys.readouterr().err
    args = resolved("--dataset", "cifar100", "--data-dir", str(tmp_path))
    run.open_data(args)
    assert args.changed == {"classes": 3}  # which no table of the paper shows


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("part", ["train", "test", "meta"])
def test_a_pickle_in_its_place_is_never_executed(part, cifar, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cifar-100-python" / part).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(data.UserError, match="cannot load cifar100 from .* by hand") as info:
        data.load("cifar100", tmp_path)
    assert "\n" not in str(info.value)
    assert not Path("executed").exists()


@pytest.fixture
def tiny(tmp_path):
    """Two classes as in Tiny-ImageNet's zip."""
    root = tmp_path / "tiny-imagenet-200"
    rows = []
    for k, name in enumerate(("n02", "n01")):
        for i in range(3):
            save(root / "train" / name / "images" / f"{name}_{i}.JPEG", 10 * k + i, (64, 64))
        for file in (f"val_{k}.JPEG", f"val_{k + 2}.JPEG"):
            save(root / "val" / "images" / file, len(rows), (64, 64))
            rows.append(f"{file}\t{name}\t0\t0\t62\t62\n")
    (root / "val" / "val_annotations.txt").write_text("".join(rows))
    return root


def test_tinyimagenet_is_downloaded_and_may_be_sorted_into_folders(tiny, tmp_path, monkeypatch):
    archive = Path(shutil.make_archive(tmp_path / "t", "zip", tmp_path, tiny.name))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/t.zip"
    md5 = hashlib.md5(archive.read_bytes()).hexdigest()
    new = tmp_path / "new"
    assert data.TINY == ("http://cs231n.stanford.edu/tiny-imagenet-200.zip",
                         "90528d7ca1a48142e341f4ef8d21d0de")
    for bad in ((url, "0" * 32), (url + "x", md5)):  # damaged on the way; not there
        monkeypatch.setattr(data, "TINY", bad)
        with pytest.raises(data.UserError, match="cannot load tinyimagenet .* by hand"):
            data.load("tinyimagenet", new)
        assert not list(new.iterdir())
    monkeypatch.setattr(data, "TINY", (url, md5))
    loaded = data.load("tinyimagenet", new)
    server.shutdown()
    assert loaded.class_names == ["n01", "n02"] and counts(loaded) == [[3, 3], [2, 2]]
    val = new / tiny.name / "val"
    for name, numbers in (("n01", (1, 3)), ("n02", (0, 2))):
        (val / name).mkdir()
        for file in (f"val_{number}.JPEG" for number in numbers):
            (val / "images" / file).rename(val / name / file)
    (val / "images").rmdir()
    assert equal(loaded, data.load("tinyimagenet", new))


def test_imagenet100_is_the_subset_of_seed_1993(tmp_path, monkeypatch):
    numbers = np.random.RandomState(1993).permutation(1000)[:100].tolist()
    names = [f"n{i:03d}" for i in range(1000)]
    (tmp_path / "imagenet" / "train").mkdir(parents=True)
    monkeypatch.setattr(data, "class_folders", lambda folder: names)
    monkeypatch.setattr(data, "list_images", lambda folder: folder.name)
    found = data.find_by_class(tmp_path, data.DATASETS["imagenet100"].roots)
    assert list(found) == [[names[i] for i in sorted(numbers)]] * 3


@pytest.mark.parametrize("root", ["stanford_cars", "cars", "car_data/car_data"])
def test_cars_layouts(tmp_path, root):
    make_tree(tmp_path / root, ("Audi R8", "audi b", "Ram C-V"), 2, 1)
    dataset = data.load("cars", tmp_path)
    assert dataset.class_names == ["Audi R8", "Ram C-V", "audi b"]  # sorted with case, as SLCA's
    assert dataset.train_images(0).shape[2:] == (300, 300)
    assert dataset.train_clean_images(0).shape[2:] == dataset.test_images(0).shape[2:] == (256, 256)


# --------------------------------------------------------------------------------------------------
# The method: parity with the original implementations, equations against naive loops

# Numbers that the original implementations computed; keys are <piece>/<array>.
GOLDEN = np.load(HERE / "test_ldc.npz")


def golden(piece):
    """The arrays of one piece as tensors, by name."""
    tensors = {}
    for key in GOLDEN.files:
        if key.startswith(piece + "/") and GOLDEN[key].dtype.kind != "U":  # text
            tensors[key.removeprefix(piece + "/")] = torch.from_numpy(GOLDEN[key])
    return tensors


def agree(ours, theirs, tolerance=1e-4):
    """The largest difference is at most `tolerance` times the largest magnitude.

    Every mistake we know of is larger.
    """
    ours, theirs = ours.detach().double(), theirs.double()
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_golden_class_order():
    g = golden("class_order")
    for i, seed in enumerate(g["seeds"].tolist()):
        for classes in (100, 200):
            order = data.class_order(classes, seed)
            assert order == g[f"order_{classes}"][i].tolist()
            assert [order.index(c) for c in range(classes)] == g[f"newlabel_{classes}"][i].tolist()
            assert data.task_sizes(classes, 10) == g[f"task_sizes_{classes}"][i].tolist()


def test_golden_sdc():
    g = golden("sdc")
    for i, sigma in enumerate((0.3, 1.0, 0.14)):
        agree(ldc.sdc_update(g["prototypes"], g["F_old"], g["F_new"], sigma), g[f"updated_{i}"])


def test_golden_ncm():
    g = golden("ncm")
    assert torch.equal(ldc.ncm(g["features"], g["prototypes"]), g["pred"])
    euclidean = ldc.ncm(g["features"], g["prototypes"], "euclidean")
    assert torch.equal(euclidean, g["pred_raw_euclidean"])
    with pytest.raises(ValueError, match="metric='l2': expected 'cosine' or 'euclidean'"):
        ldc.ncm(g["features"], g["prototypes"], "l2")


def test_golden_ldc_linear():
    g = golden("ldc_linear")
    projector = nn.Linear(16, 16, bias=False)
    projector.weight.data = g["W_init"].clone()
    batch_size = int(g["batch_size"])
    pairs = list(zip(g["F_old"].split(batch_size), g["F_new"].split(batch_size)))
    ldc.train_projector(projector, lambda: pairs, int(g["epochs"]), g["lr"].item())
    agree(projector.weight, g["W_final"])
    agree(projector(g["prototypes"]), g["projected"])


def test_golden_adc():
    g = golden("adc_attack")

    def network(which):
        w1, b1, w2, b2 = (g[f"{which}_{name}"] for name in ("W1", "b1", "W2", "b2"))
        return lambda x: F.relu(F.linear(F.relu(F.linear(x.flatten(1), w1, b1)), w2, b2))

    moved = beyond.adc_update(
        g["prototypes"], g["images"], network("old"), network("new"), alpha=g["alpha"].item(),
        steps=int(g["iterations"]), nearest=int(g["sample_limit"]))
    agree(moved, g["updated"])


def test_golden_real_drift():
    """One real step of an LwF backbone on CIFAR-100, its features kept in 8 bits.

    Each estimator is as accurate as an independent computation; the paper's order shows.
    """
    g = golden("real_drift")
    old, new, test = (g[name] * g[name + "_scale"]
                      for name in ("feats_old", "feats_new", "test_feats"))
    prototypes = g["prototypes"]

    def accuracy(moved):
        every = torch.cat([moved, g["oracle"][50:]])
        return 100 * (ldc.ncm(test, every) == g["test_labels"]).float().mean().item()

    def closed_form(ridge):
        p_F = ldc.fit_projector(old, new, solver="ridge", ridge=ridge)
        return accuracy(p_F(prototypes))

    def adam(projector):
        reached = []
        for seed in range(3):
            torch.manual_seed(seed)
            p_F = ldc.fit_projector(old, new, projector=projector)
            reached.append(accuracy(p_F(prototypes)))
        return sum(reached) / 3

    identity = nn.Linear(128, 128, bias=False)
    nn.init.eye_(identity.weight)
    reached = {
        "none": accuracy(prototypes),
        "oracle": accuracy(g["oracle"][:50]),
        "sdc_sigma0.3": accuracy(ldc.sdc_update(prototypes, old, new, 0.3)),
        "sdc_sigma1.0": accuracy(ldc.sdc_update(prototypes, old, new, 1.0)),
        "least_squares": closed_form(1e-9),
        "ridge_identity_0.01": closed_form(0.01),
        "ridge_identity_0.1": closed_form(0.1),
        "ldc_adam_default_init": adam("linear"),
        "ldc_adam_identity_init": adam(identity)}
    for name, value in reached.items():
        # 0.12 points are seven of the 6,000 images: what the 8 bits cost
        assert abs(value - g[f"accuracy/{name}"].item()) < 0.12, name
    assert reached["none"] + 0.5 < reached["ldc_adam_default_init"]
    assert reached["ldc_adam_default_init"] < reached["least_squares"] < reached["oracle"]


@pytest.mark.parametrize("extra", [0, 5, -5])
def test_closed_form_streams_and_is_shrunk_towards_the_last_columns(extra):
    """Towards the identity on the last 16 columns of A, zero on those before or if it has fewer."""
    wide = 16 + extra
    old, new = torch.randn(500, wide), torch.randn(500, 16)
    stay = torch.zeros(wide, 16).double()
    if extra >= 0:
        for i in range(16):
            stay[extra + i, i] = 1
    A, B = old.double(), new.double()
    shrink = 0.05 * (A.T @ A).diagonal().mean()
    eye = torch.eye(wide).double()
    expected = torch.linalg.inv(A.T @ A + shrink * eye) @ (A.T @ B + shrink * stay)
    solved = ldc.solve_projector(zip(old.split(64), new.split(64)), ridge=0.05).weight.T
    assert torch.allclose(solved, expected.float(), atol=1e-5)
    dead = ldc.solve_projector([(old * 0, new)]).weight.T  # images that excite no direction
    assert torch.allclose(dead, stay.float())


def test_sdc_equals_the_double_loop_of_its_equations():
    prototypes, old, new = torch.rand(4, 6), torch.rand(9, 6), torch.rand(9, 6)
    for unit in (False, True):
        moved = ldc.sdc_update(prototypes, old, new, 0.3, unit=unit)
        for c, p in enumerate(prototypes):
            total, drift = 0.0, torch.zeros(6)
            for a, b in zip(old, new):
                distance = ((a / a.norm() - p / p.norm()) if unit else (a - p)).norm()
                weight = math.exp(-distance ** 2 / (2 * 0.3 ** 2)) + 1e-5
                total, drift = total + weight, drift + weight * (b - a)
            assert torch.allclose(moved[c], p + drift / total, atol=1e-5)


def test_herding_equals_the_greedy_loop():
    feats = torch.randn(12, 5)
    unit = feats / feats.norm(dim=1, keepdim=True)
    chosen = []
    for k in range(1, 6):
        error = {}
        for i in set(range(12)) - set(chosen):
            mean = (sum(unit[j] for j in chosen) + unit[i]) / k
            error[i] = (unit.mean(0) - mean).norm()
        chosen.append(min(error, key=error.get))
    assert ldc.herding(feats, 5).tolist() == chosen
    assert sorted(ldc.herding(feats, 50).tolist()) == list(range(12))


@pytest.mark.parametrize("classes", [[0, 2, 1], [3, 7], [5]])
def test_stores_move_old_classes_once_and_the_scatter_along(classes):
    feats = torch.randn(40 * len(classes), 4)
    labels = torch.tensor(classes).repeat(40)
    means = torch.stack([feats[labels == c].mean(0) for c in classes])
    within = sum(torch.cov(feats[labels == c].T, correction=0) for c in classes) / len(classes)
    W = torch.randn(4, 4)
    for store in (ldc.PrototypeStore(), beyond.ScatterStore()):
        store.move(lambda prototypes: 1 / 0)  # there is nothing to move yet
        store.add(feats, labels, classes)
        store.move(lambda p: p @ W)
        if isinstance(store, beyond.ScatterStore):
            assert torch.allclose(store.covariance().float(), W.T @ within @ W, atol=1e-4)
        store.add(feats, labels + 10, [c + 10 for c in classes])
        assert torch.allclose(store.means, torch.cat([means @ W, means]), atol=1e-5)
        assert store.classes == [*classes, *(c + 10 for c in classes)]


@pytest.mark.parametrize("kind", [ldc.PrototypeStore, beyond.ScatterStore])
def test_stores_refuse_what_makes_no_prototype(kind):
    store = kind()
    store.add(torch.rand(4, 3), torch.tensor([0, 1, 0, 1]), range(2))
    before = store.means.clone()
    for words, feats, c in (("class 2 has no image", torch.rand(4, 3), 2),
                            ("class 1 has a prototype already", torch.rand(4, 3), 1),
                            ("not finite", torch.full((4, 3), math.nan), 3)):
        with pytest.raises(ValueError, match=words):
            store.add(feats, torch.tensor([1, 3, 1, 3]), [c])
    for words, update in (("expected one vector", lambda p: p[:-1]),
                          ("expected one vector", lambda p: p.double()),
                          ("expected one vector", lambda p: p[0]),
                          ("of list: expected one vector", lambda p: p.tolist()),
                          ("expected one vector", lambda p: p.mean()),
                          ("not finite", lambda p: p / 0)):
        with pytest.raises(ValueError, match=words):
            store.move(update)
    assert torch.equal(store.means, before) and store.classes == [0, 1]
    store.add(torch.full((600, 3), 150.0).half(), torch.full((600,), 2), [2])
    assert torch.equal(store.means[2], torch.full((3,), 150.0))  # though their sum overflows


def test_lda_is_the_cosine_in_the_metric_of_the_shrunk_covariance():
    """f^T A p / sqrt(p^T A p) with A = (S + l I)^-1, largest among the classes."""
    torch.manual_seed(0)
    feats, means, B = torch.randn(60, 4), torch.randn(5, 4), torch.randn(4, 4).double()
    covariance = B @ B.T
    A = torch.linalg.inv(covariance + 0.5 * covariance.diagonal().mean() * torch.eye(4)).float()
    expected = [max(range(5), key=lambda c: f @ A @ means[c] / (means[c] @ A @ means[c]).sqrt())
                for f in feats]
    assert beyond.lda(feats, means, covariance, shrink=0.5).tolist() == expected
    one_image = torch.zeros(4, 4).double()  # no scatter: plain nearest mean
    assert torch.equal(beyond.lda(feats, means, one_image), ldc.ncm(feats, means))


# --------------------------------------------------------------------------------------------------
# ldc_update in somebody else's code


class Tiny(nn.Module):
    """A network with batch-norm whose features may be among other outputs."""

    def __init__(self, dim):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, dim, 3), nn.BatchNorm2d(dim), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.pack = lambda x, feats: feats

    def forward(self, x):
        return self.pack(x, self.body(x))

    def packed(self, pack):
        self.pack = pack
        return self


class Learner:
    """No module, but it has one, as PyCIL's learners do."""

    def __init__(self, net):
        self._network = net

    def extract(self, x):
        return self._network(x)


MODELS = {
    "module": lambda net: net,
    "dictionary": lambda net: net.packed(lambda x, feats: {"fmaps": [x], "features": feats}),
    "tuple": lambda net: net.packed(lambda x, feats: (x, feats, feats.flip(1))),
    "lambda": lambda net: lambda x: net(x),
    "method": lambda net: net.forward,
    "learner's method": lambda net: Learner(net).extract,
}


@pytest.mark.parametrize("kind", list(MODELS))
def test_ldc_update_reads_any_models_in_eval_mode(kind):
    """Networks in train mode stay so; PyCIL's batches; prototypes in half precision."""
    torch.manual_seed(0)
    old, new, images = Tiny(5), Tiny(7), torch.randn(40, 3, 8, 8)
    prototypes = torch.rand(6, 5).half()
    with ldc.eval_mode(old, new):
        pairs = ldc.paired_pass(old, new, [images])
    expected = ldc.fit_projector(*pairs, solver="ridge")(prototypes.float()).half()
    new.body[1].eval()  # a caller may have frozen a part of the network
    before = [p.clone() for p in (*old.state_dict().values(), *new.state_dict().values())]
    dataset = torch.utils.data.TensorDataset(torch.arange(40), images, torch.arange(40))
    loader = torch.utils.data.DataLoader(dataset, batch_size=16)
    moved = ldc.ldc_update(prototypes, MODELS[kind](old), MODELS[kind](new), loader, solver="ridge")
    assert moved.dtype == torch.float16 and torch.allclose(moved, expected, atol=1e-2)
    after = [*old.state_dict().values(), *new.state_dict().values()]
    assert all(map(torch.equal, before, after))  # no running statistic was touched
    assert old.training and new.training and old.body[1].training and not new.body[1].training


@pytest.mark.parametrize("projector", [*ldc.PROJECTORS, nn.Linear(12, 12)])
def test_ldc_update_by_adam_fits_what_its_projector_can(projector):
    """Also a module of one's own, which is copied, and where gradients are switched off."""
    own = isinstance(projector, nn.Module)
    before = copy.deepcopy(projector)
    torch.manual_seed(0)
    W, images = torch.rand(12, 12), torch.rand(200, 3, 2, 2)
    shift = 3.0 if own or projector in ("linear+bias", "mlp") else 0.0
    prototypes = torch.rand(9, 12)
    truth = prototypes @ W + shift
    with torch.no_grad():
        moved = ldc.ldc_update(prototypes, nn.Flatten(), lambda x: x.flatten(1) @ W + shift,
                               [images], projector=projector, epochs=300, lr=5e-3, batch_size=50)
    # a ReLU unit that is dead at the start stays dead: inputs are never negative, so no gradient
    # wakes it
    share = 0.5 if projector == "linear+relu" else 0.1
    assert (moved - truth).norm() < share * (prototypes - truth).norm()
    assert not own or torch.equal(projector.weight, before.weight)


@pytest.mark.filterwarnings("ignore:p_F fits the pairs worse")
@pytest.mark.parametrize("solver", ["adam", "ridge"])
def test_ldc_update_is_its_three_steps(solver):
    """Paired features of `passes` passes, fit_projector, apply: the functions that a run uses."""
    images, prototypes, W = torch.rand(60, 3, 2, 2), torch.rand(4, 12), torch.rand(12, 12)

    class Noisy:  # fresh augmentation in every pass
        def __iter__(self):
            return iter((images + 0.1 * torch.randn(60, 3, 2, 2)).split(20))

    def new_model(x):
        return x.flatten(1) @ W

    torch.manual_seed(1)
    moved = ldc.ldc_update(prototypes, nn.Flatten(), new_model, Noisy(), passes=3, solver=solver)
    torch.manual_seed(1)
    passes = [ldc.paired_pass(nn.Flatten(), new_model, Noisy()) for _ in range(3)]
    assert torch.equal(moved, ldc.fit_projector(*zip(*passes), solver=solver)(prototypes))
    weights = []
    for used in (passes, passes[:2]):  # every pass counts
        torch.manual_seed(2)
        weights.append(ldc.fit_projector(*zip(*used), solver=solver).weight)
    assert not torch.equal(*weights)


def test_ldc_update_warns_where_it_would_do_harm():
    """Nothing drifted, 500 images, 512 features: Adam from a random start is worse than nothing."""
    images = [torch.rand(500, 512, 1, 1)]
    prototypes = torch.rand(3, 512)
    with pytest.warns(UserWarning, match='use solver="ridge" or more epochs'):
        moved = ldc.ldc_update(prototypes, nn.Flatten(), nn.Flatten(), images)
    assert F.cosine_similarity(moved, prototypes).min() < 0.999
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moved = ldc.ldc_update(prototypes, nn.Flatten(), nn.Flatten(), images, solver="ridge")
    assert F.cosine_similarity(moved, prototypes).min() > 0.9999


def test_ldc_update_says_what_is_wrong():
    images = torch.rand(4, 3, 2, 2)
    right = dict(prototypes=torch.rand(2, 12), old_model=nn.Flatten(), new_model=nn.Flatten(),
                 batches=[images])
    cases = [
        ("only once", dict(batches=iter([images]), passes=2)),
        ("expected one of", dict(projector="cubic")),
        ("expected one of", dict(solver="newton")),
        ("expected one of", dict(projector=nn.Linear(12, 12), solver="ridge")),
        ("no batch", dict(batches=[])),
        ("batches yields dict", dict(batches=[{"image": images}])),
        ("batches yields Tensor", dict(batches=[torch.arange(4)])),
        ("a model returned dict", dict(old_model=lambda x: {"logits": x.flatten(1)})),
        ("a model returned tuple", dict(new_model=lambda x: (x, x))),
        (r"a model returned \(4, 3, 2, 2\)", dict(new_model=lambda x: x)),
        (r"expected \(C, 12\)", dict(prototypes=torch.rand(2, 11))),
        (r"expected \(C, 12\)", dict(prototypes=torch.rand(12))),
        ("not finite", dict(new_model=lambda x: x.flatten(1) / 0)),
    ]
    for words, changes in cases:
        with pytest.raises(ValueError, match=words):
            ldc.ldc_update(**{**right, **changes})


COPIED = {
    "ldc.py": """
import sys, torch, ldc
net, images = torch.nn.Flatten(), torch.rand(8, 3, 2, 2)
print(tuple(ldc.ldc_update(torch.rand(3, 12), net, net, [images], solver="ridge").shape))
assert "torchvision" not in sys.modules
""",
    "beyond.py": """
import torch, beyond
net, images = torch.nn.Flatten(), torch.rand(8, 3, 2, 2)
print(tuple(beyond.adc_update(torch.rand(3, 12), images, net, net).shape))
""",
}


def test_files_of_the_method_can_be_copied_alone(tmp_path):
    """Into a folder with nothing else of ours: first ldc.py, then beyond.py beside it."""
    for name, code in COPIED.items():
        shutil.copy(HERE / name, tmp_path)
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True,
                              text=True)
        assert done.stdout.strip() == "(3, 12)", done.stderr


IMPORTS = {  # module -> those of ours that it may import
    "ldc": set(), "beyond": {"ldc"}, "data": set(), "report": set(), "strategies": {"data"},
    "run": {"ldc", "beyond", "strategies", "data", "report"},
}


def imports(tree):
    """The modules that the import statements in a piece of code name."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("name", list(IMPORTS))
def test_imports_go_one_way_and_stand_at_the_top(name):
    """But matplotlib's, what fig-toy needs, and what ldc.py and data.py do when they are run."""
    body = ast.parse((HERE / f"{name}.py").read_text(encoding="utf-8")).body
    if name in ("ldc", "data"):
        assert imports(body.pop()) == ({"run"} if name == "ldc" else {"ldc", "strategies"})
    blocks = [part for part in body if isinstance(part, (ast.FunctionDef, ast.ClassDef))]
    inside = [imports(part) for part in blocks if imports(part) and imports(part) != {"matplotlib"}]
    assert inside == ([{"torch", "ldc"}] if name == "report" else [])
    rest = set().union(*(imports(part) for part in body if part not in blocks))
    assert rest & set(IMPORTS) == IMPORTS[name]


# --------------------------------------------------------------------------------------------------
# Prototypes with an anchor


def observed_drift(phi, old, new, **options):
    """A Drift of paired features, with default options."""
    chosen = {**run.preset_options("lwf", "cifar100", "paper"), **options}
    return run.Drift(old, new, SimpleNamespace(**chosen), phi=phi)


def test_anchored_prototypes_move_by_the_ridge_solution_and_keep_their_anchor():
    """Column by column, (X^T X + l I) w = X^T b + l s with s the unit vector of P's own column."""
    torch.manual_seed(0)
    phi, old, new = torch.rand(40, 5), torch.rand(40, 3), torch.rand(40, 3)
    prototypes = torch.rand(4, 8)
    moved = run.COMPENSATORS["ldc-anchor"](prototypes, observed_drift(phi, old, new))
    X = np.concatenate([phi, old], 1).astype(np.float64)
    pull = 1e-4 * np.mean([column @ column for column in X.T])
    for j in range(3):
        start = pull * np.eye(8)[5 + j]
        w = np.linalg.solve(X.T @ X + pull * np.eye(8), X.T @ new[:, j].numpy() + start)
        assert torch.allclose(moved[:, 5 + j], torch.from_numpy(prototypes.numpy() @ w).float())
    assert torch.equal(moved[:, :5], prototypes[:, :5])


def test_an_anchor_of_no_width_is_the_closed_form():
    old, new, prototypes = torch.rand(40, 6), torch.rand(40, 6), torch.rand(4, 6)
    drift = observed_drift(torch.empty(40, 0), old, new, anchor_ridge=1e-3)
    rows = [run.COMPENSATORS[name](prototypes, drift) for name in ("ldc-ridge", "ldc-anchor")]
    assert torch.equal(*rows)


def test_an_anchor_sees_what_the_old_features_have_lost():
    """Two old classes differ in a direction that f_{t-1} is blind to and f_t is not."""
    torch.manual_seed(0)

    def features(z):  # phi, f_{t-1}, f_t
        return z @ torch.tensor([[1.0, 0.5, 0], [0, 1, 1], [1, 0, -1.0]]), z * lost, z @ turn

    lost, turn = torch.tensor([1.0, 1, 0]), torch.linalg.qr(torch.randn(3, 3)).Q
    labels = torch.arange(200) % 2
    centres = torch.tensor([[1.0, 1, 2], [1, 1, -2]])
    phi, old, new = features(centres[labels] + 0.1 * torch.randn(200, 3))
    store = ldc.PrototypeStore()
    store.add(torch.cat([phi, old], 1), labels, [0, 1])
    drift = observed_drift(*features(torch.randn(300, 3)))
    truth, off = ldc.class_means(new, labels, [0, 1]), {}
    for name, start in (("ldc-ridge", 3), ("ldc-anchor", 0)):
        moved = run.COMPENSATORS[name](store.means[:, start:], drift)[:, -3:]
        off[name] = (moved - truth).norm(dim=1).min()
    assert off["ldc-anchor"] < 0.01 and off["ldc-ridge"] > 1.9  # two apart in the lost direction


def random_layer(image, filters, groups, threshold):
    """Both signs of a convolution (c, H, W) -> (2k, H, W), place by place."""
    filters, (_, side, _) = filters.double().numpy(), image.shape
    size, maps = filters.shape[-1], []
    padded = np.pad(image, ((0, 0), (size // 2,) * 2, (size // 2,) * 2))
    for k, one in enumerate(filters):
        first = k * groups // len(filters) * len(one)
        seen = padded[first:first + len(one)]
        maps.append([[(seen[:, i:i + size, j:j + size] * one).sum() for j in range(side)]
                     for i in range(side)])
    signs = np.concatenate([np.array(maps), -np.array(maps)])
    return np.maximum(signs - threshold, 0)


def test_phi_is_two_random_layers():
    """Of the last of nine images; and its seeds' numbers, on which every stored phi-mean relies."""
    anchor = beyond.Anchor(4, 8, 2)
    x = torch.randn(9, 3, 8, 8, generator=gen())
    h = random_layer(x[8].double().numpy(), anchor.first, 1, 0.5)
    h = h.reshape(8, 4, 2, 4, 2).mean((2, 4))
    h = h / np.sqrt((h ** 2).mean())
    g = random_layer(h, anchor.second, 2, 0.2)
    expected = np.concatenate([part.mean((1, 2)) for part in (h[:, :2], h[:, 2:], g)])
    assert np.allclose(anchor(x)[8], expected, atol=1e-5)
    seeds = [beyond.Anchor().first[0, 0, 0, :3], beyond.Anchor().second[0, 0, 0]]
    assert torch.allclose(torch.cat(seeds), torch.tensor(
        [-0.1316, -0.13446, -0.0371, -0.12303, -0.0605, -0.05274]), atol=1e-5)


def test_the_anchor_is_fixed_cheap_and_takes_any_image():
    anchor = beyond.Anchor()
    assert not list(anchor.parameters()) and not anchor.state_dict()
    for side in (16, 32, 48, 224):
        x = torch.randn(2, 3, side, side, generator=gen())
        assert anchor(x).shape == (2, anchor.dim)
        torch.manual_seed(side)  # other draws do not touch it
        assert torch.equal(beyond.Anchor()(x), anchor(x))
    x, work = torch.randn(1, 3, 32, 32), []
    for network in (anchor, strategies.ResNet18(64).eval()):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            network(x)
        work.append(counter.get_total_flops())
    assert work[0] < 0.1 * work[1]


def test_anchored_update_is_the_row_in_your_own_code():
    torch.manual_seed(0)
    images, labels = torch.randn(30, 3, 8, 8), torch.arange(30) % 3
    old, new = (nn.Sequential(nn.Flatten(), nn.Linear(192, 6)) for _ in range(2))
    anchor, store = beyond.Anchor(8, 16, 4), ldc.PrototypeStore()
    with torch.no_grad():
        store.add(beyond.Beside(anchor, old)(images), labels, range(3))
        drift = observed_drift(anchor(images), old(images), new(images))
    row = run.COMPENSATORS["ldc-anchor"](store.means, drift)
    store.move(lambda p: beyond.anchored_update(p, anchor, old, new, images.split(10)))
    assert torch.allclose(store.means, row, atol=1e-5)


# --------------------------------------------------------------------------------------------------
# All strategies: settings, what may be read, what a checkpoint holds

every_strategy = pytest.mark.parametrize("name", list(strategies.STRATEGIES))
FREE = [row for row in run.COMPENSATORS if "old images" not in run.needed([row])]


def settings_of(name, dataset="demo", scale="smoke"):
    return run.preset_settings(name, dataset, scale)


def make(name, dataset="demo", size=16, weights_file=None, device="cpu", amp=False, **changes):
    """A strategy with the data set's settings at scale smoke, and changes."""
    settings = {**settings_of(name, dataset), **changes}
    return strategies.STRATEGIES[name](settings, size, device=device, amp=amp,
                                       weights_file=weights_file)


def brief(name, count=1, **changes):
    """The strategy with one epoch per task, or `count`."""
    names = ("first_epochs", "epochs", "first_expert_epochs", "expert_epochs", "head_epochs")
    epochs = {key: count for key in names if key in strategies.STRATEGIES[name].defaults}
    return make(name, **{**epochs, **changes})


def short_tasks(count, per_class=8):
    """The first tasks of the demo with a few images of each class; images are sorted by class."""
    stream = data.TaskStream(data.load("demo"), tasks=10)
    for t in range(count):
        task = stream.task(t)
        few = [(task.labels == c).nonzero()[:per_class, 0] for c in task.classes]
        yield task.subset(torch.cat(few))


def one_batch(strategy, task):
    return next(iter(strategy.batches(strategy.visible(task), gen())))


def test_every_setting_resolves_and_has_a_help_text():
    """A new setting without a line in SETTINGS, or one that nobody has any more, fails here."""
    used = set()
    for name, strategy in strategies.STRATEGIES.items():
        for dataset in data.DATASETS:
            for scale in run.SCALES:
                used |= set(settings_of(name, dataset, scale))
        assert set(strategy.defaults) <= set(strategies.SETTINGS) & used
        assert set(strategy.ldc_options) <= set(run.OPTIONS)
    assert set(strategies.SETTINGS) <= used


@every_strategy
def test_every_strategy_is_exemplar_free_or_says_so(name, tmp_path):
    """While task t is learnt and compensated, no image of an earlier task is read, except by a
    strategy that declares it."""
    dataset = data.load("demo", limit=8)
    one = open_run("--strategy", name, "--scale", "smoke", "--tasks", "10", "--device", "cpu",
                   "--ldc-epochs", "1", "--out-dir", str(tmp_path), "--compensators", *FREE,
                   dataset=dataset)
    stream, strategy = one.stream, one.strategy
    read, images_of = set(), dataset.train_images

    def watched(c):
        read.add(stream.class_order.index(c))
        return images_of(c)

    dataset.train_images = dataset.train_clean_images = watched
    for t in range(2):
        read.clear()
        one.step()
        first = 0 if strategy.reads_old_tasks else 5 * t
        assert read <= set(range(first, 5 * (t + 1)))
    readers = {reader for reader, count in stream.opened.items() if count}
    assert readers == ({"joint"} if strategy.reads_old_tasks else set())


def same_tensors(a, b):
    """Whether two state_dicts are equal."""
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_non_finite_loss_stops_naming_task_and_step():
    task, = short_tasks(1)
    with pytest.raises(data.UserError, match=r"task 1, epoch 1, step \d+"):
        make("lwf", first_lr=1e30).learn(task)


EPOCHS = dict.fromkeys(("first_epochs", "epochs", "first_expert_epochs", "expert_epochs"), 3)


@every_strategy
def test_every_strategy_resumes_to_the_last_bit(name, tmp_path):
    """Killed inside the first epoch of each task, inside a later one, and after training; training
    moves the backbone unless it rests, but never an earlier snapshot."""
    class Killed(BaseException):
        pass

    def build(kill_at=math.inf, checkpoint=None):
        settings = {key: value for key, value in EPOCHS.items()
                    if key in strategies.STRATEGIES[name].defaults}
        strategy = make(name, batch_size=4, **settings)
        if checkpoint:
            strategy.load_state(torch.load(checkpoint, weights_only=True))
        steps, loss = [], strategy.loss

        def counted(*batch):
            steps.append(1)
            if len(steps) == kill_at:
                raise Killed
            return loss(*batch)

        strategy.loss = counted
        return strategy, steps

    whole, checkpoint = build()[0], None
    for task in short_tasks(3, per_class=2):
        earlier = whole.snapshot()
        whole.learn(task)
        for kill_at in (2, 7, math.inf, math.inf):
            strategy, steps = build(kill_at, checkpoint)
            strategy.progress = run.Progress(tmp_path / "p", {"settings": {}, "options": {}}, "cpu")
            strategy.progress.every = 0
            with contextlib.suppress(Killed):
                strategy.learn(task)
        assert not steps  # all had been learnt and saved: nothing is trained again
        checkpoint = tmp_path / "state.pt"
        torch.save(strategy.state(), checkpoint)
    assert same_tensors(whole.net.state_dict(), strategy.net.state_dict())
    assert str(whole.memory) == str(strategy.memory)
    assert len(whole.memory.get("means", range(15))) == 15  # of all classes so far
    images = task[torch.arange(len(task))]
    feats = whole.snapshot()(images)
    assert torch.equal(feats, earlier(images)) == whole.frozen_after_first
    if hasattr(whole, "classify"):
        labels = whole.classify(feats)
        assert labels.max() < task.classes.stop and torch.equal(labels, strategy.classify(feats))


@every_strategy
def test_every_strategy_trains_in_bfloat16_on_a_cpu(name):
    strategy, plain = brief(name, amp=True), brief(name)
    task, = short_tasks(1)
    strategy.learn(task)
    plain.learn(task)
    trained, exact = strategy.net.state_dict(), plain.net.state_dict()
    assert not same_tensors(trained, exact)
    for key, value in trained.items():
        assert value.dtype == exact[key].dtype and value.isfinite().all()


# --------------------------------------------------------------------------------------------------
# Backbones and heads


def test_resnet18_has_the_authors_stems_and_any_width():
    for stem, side in (("cifar", 8), ("imagenet", 4), ("standard", 2)):
        net = strategies.ResNet18(6, stem)
        seen = []
        net.layer1[0].register_forward_hook(lambda m, i, o: seen.append(o.shape[-1]))
        feats = net(torch.rand(2, 3, 8, 8))
        assert feats.shape == (2, 48) == (2, net.dim) and (feats >= 0).all() and seen == [side]


def test_memory_format():
    """In channels-last oneDNN can crash at width 8; a strategy needs no settings of a head."""
    for device, width, expected in (
            ("cpu", 8, torch.contiguous_format), ("cpu", 16, torch.channels_last),
            ("mps", 64, torch.contiguous_format), ("cuda", 8, torch.channels_last)):
        assert strategies.memory_format(torch.device(device), width) == expected
        if device == "cpu":
            strategy = strategies.Strategy({**strategies.Strategy.defaults, "width": width}, 16)
            weight = strategy.net["backbone"].layer1[1].conv1.weight
            assert weight.is_contiguous(memory_format=expected)


def test_golden_cosine_head_keeps_its_logits_as_it_grows():
    g = golden("cosine_head")
    head = strategies.CosineHead(24)
    head.grow(10)
    head.weight.data, head.sigma.data = g["weight"].clone(), g["sigma"].reshape(1).clone()
    feats = g["features"].clone().requires_grad_()
    logits = head(feats)
    (logits * g["cotangent"]).sum().backward()
    agree(logits, g["logits"])
    agree(feats.grad, g["grad_features"])
    agree(head.weight.grad, g["grad_weight"])
    agree(head.sigma.grad, g["grad_sigma"])
    head.grow(13)
    agree(head(feats)[:, :10], g["logits_after_expand"])


def test_any_torchvision_backbone_gives_features(tmp_path):
    """And takes torchvision's weights, without the classifier's."""
    backbone = strategies.torchvision_backbone("vit_b_16", 32).eval()
    assert backbone(torch.rand(2, 3, 32, 32)).shape == (2, backbone.dim)
    theirs, path = torchvision.models.mobilenet_v3_small().state_dict(), tmp_path / "w.pth"
    torch.save(theirs, path)
    backbone = strategies.torchvision_backbone("mobilenet_v3_small", 32)
    strategies.load_weights(backbone, path)
    del theirs["classifier.3.weight"], theirs["classifier.3.bias"]
    assert same_tensors(backbone.state_dict(), theirs)


def linear(weight, bias=None):
    """A head with these weights."""
    head = strategies.LinearHead(weight.shape[1], nn.init.zeros_, bias is not None)
    head.weight = nn.Parameter(weight.clone())
    head.bias = nn.Parameter(bias.clone()) if bias is not None else None
    return head


# --------------------------------------------------------------------------------------------------
# Pre-trained weights

DIM, HEADS, SIZE, LAYERS, PATCH, MLP = 24, 3, 8, 2, 8, 40


def tiny_vit():
    model = torchvision.models.VisionTransformer(32, PATCH, LAYERS, HEADS, DIM, MLP)
    model.heads = nn.Identity()
    model.classifier_name, model.dim = "heads.head", DIM
    return model.eval()


def jax_arrays():
    """A random ViT with the names and axes of Google's release, drawn as it computes.

    Returns its arrays, four images, and their features in float64: the CLS token after the norm.
    """
    rng, arrays, images = np.random.default_rng(0), {}, torch.randn(4, 3, 32, 32, generator=gen())

    def draw(name, *shape):
        arrays[name] = rng.normal(0, 0.3, shape).astype(np.float32)
        return torch.from_numpy(arrays[name]).double()

    def norm(x, name):
        return F.layer_norm(x, [DIM], draw(name + "/scale", DIM), draw(name + "/bias", DIM), 1e-6)

    def dense(x, name, *shape, axes=1):
        """The last axes of x times the first of a kernel, plus a bias."""
        product = torch.tensordot(x, draw(name + "/kernel", *shape), axes)
        return product + draw(name + "/bias", *shape[axes:])

    # (B, rows, columns, height, width, 3)
    patches = images.double().unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH).movedim(1, -1)
    x = dense(patches, "embedding", PATCH, PATCH, 3, DIM, axes=3).flatten(1, 2)
    x = torch.cat([draw("cls", 1, 1, DIM).expand(4, 1, DIM), x], 1)
    x = x + draw("Transformer/posembed_input/pos_embedding", 1, 17, DIM)
    for i in range(LAYERS):
        block = f"Transformer/encoderblock_{i}/"
        y, attention = norm(x, block + "LayerNorm_0"), block + "MultiHeadDotProductAttention_1/"
        q, k, v = (dense(y, attention + part, DIM, HEADS, SIZE)
                   for part in ("query", "key", "value"))
        mix = torch.einsum("bthe,bshe->bhts", q, k).div(SIZE ** 0.5).softmax(-1)
        mixed = torch.einsum("bhts,bshe->bthe", mix, v)
        x = x + dense(mixed, attention + "out", HEADS, SIZE, DIM, axes=2)
        y = dense(norm(x, block + "LayerNorm_2"), block + "MlpBlock_3/Dense_0", DIM, MLP)
        x = x + dense(F.gelu(y), block + "MlpBlock_3/Dense_1", MLP, DIM)
    feats = norm(x, "Transformer/encoder_norm")[:, 0]
    dense(feats, "head", DIM, 7)  # of ImageNet-21k
    return arrays, images, feats


def test_googles_weights_give_the_same_features(tmp_path):
    arrays, images, feats = jax_arrays()
    model, path = tiny_vit(), tmp_path / "a.npz"
    np.savez(path, **arrays)
    strategies.load_weights(model, path)
    assert (model(images) - feats).abs().max() < 1e-5
    del arrays["Transformer/encoderblock_1/LayerNorm_0/bias"]
    np.savez(path, **arrays)
    with pytest.raises(data.UserError, match=r"\(KeyError: .*encoderblock_1"):
        strategies.load_weights(model, path)


def test_weights_of_resnet18(tmp_path):
    """A strategy that starts from torchvision's computes the same; no tensor may be missing."""
    theirs, images = torchvision.models.resnet18(num_classes=5), torch.randn(4, 3, 32, 32)
    theirs(images)  # moves the statistics of batch-norm
    state, path = theirs.state_dict(), tmp_path / "w.pth"
    torch.save(state, path)
    strategy = make("finetune", stem="standard", width=64, weights=str(path), weights_file=path)
    task = FixedTask(0, range(3))
    strategy.start(task)
    theirs.fc = nn.Identity()
    agree(strategy.snapshot()(images), theirs.eval()(images), 1e-5)
    del state["bn1.bias"]
    torch.save(state, path)
    with pytest.raises(data.UserError, match="^[^\n]*bn1.bias[^\n]*$"):
        strategy.start(task)


@pytest.mark.parametrize("name,content", [
    ("w.npz", b"PK\x03\x04 cut short"), ("w.pth", b""), ("w.pth", b"<html></html>")])
def test_damaged_weight_files_are_refused(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(data.UserError, match="does not fit the backbone"):
        strategies.load_weights(tiny_vit(), path)


def test_weights_are_found_or_downloaded_or_asked_for(tmp_path, monkeypatch):
    def find(weights="in21k", backbone="vit_b_16"):
        settings = SimpleNamespace(backbone=backbone, weights=weights)
        return strategies.find_weights(settings, tmp_path / "data")

    source, path = tmp_path / "B_16.npz", tmp_path / "data" / "weights" / "B_16.npz"
    monkeypatch.setattr(strategies, "IN21K", source.as_uri())
    with pytest.raises(data.UserError, match=r"put it at .*weights.B_16.npz"):
        find()
    assert not any(path.parent.iterdir())  # nothing half done remains
    source.write_bytes(b"content")
    assert find() == path and path.read_bytes() == b"content"
    source.unlink()
    assert find() == path == find(str(path)) and find("none") is None
    for wrong in (("nowhere.npz",), ("in21k", "resnet18"), ("torchvision", "resnet19")):
        with pytest.raises(data.UserError, match="there is no such file for --backbone"):
            find(*wrong)
    # torchvision's by its own list, the checksum in the name compared
    asked = []
    monkeypatch.setattr(torch.hub, "download_url_to_file", lambda *args: asked.append(args))
    path = find("torchvision", "resnet18")
    url = torchvision.models.ResNet18_Weights.DEFAULT.url
    assert asked == [(url, str(path), url[-12:-4])] and path.name == Path(url).name


def test_cars_recipe(tmp_path, monkeypatch):
    """SLCA's settings reach the optimiser; training starts from the weights, at a fresh norm that a
    checkpoint keeps."""
    monkeypatch.setattr(strategies, "torchvision_backbone", lambda name, size: tiny_vit())
    arrays, images, _ = jax_arrays()
    np.savez(tmp_path / "a.npz", **arrays)
    build = functools.partial(make, "finetune", **settings_of("finetune", "cars", "paper"))
    strategy = build(weights_file=tmp_path / "a.npz")
    first, second = FixedTask(0, range(3)), FixedTask(1, range(3, 6))
    strategy.start(first)
    backbone, head = strategy.net["backbone"], strategy.net["head"]
    assert torch.equal(backbone.class_token.detach(), torch.from_numpy(arrays["cls"]))
    assert (backbone.encoder.ln.weight == 1).all() and head.weight.abs().max() < 0.1
    optimizer, scheduler = strategy.optimizer(first)
    rates = [(g["lr"], g["weight_decay"], g["momentum"]) for g in optimizer.param_groups]
    assert rates == [(1e-4, 5e-4, 0.9), (pytest.approx(0.01), 5e-4, 0.9)]
    assert optimizer.param_groups[1]["params"] == [head.weight, head.bias]
    assert sorted(scheduler.milestones) == [40]
    backbone.class_token.data.zero_()
    strategy.start(second)
    assert not backbone.class_token.any()  # no weights are loaded again
    strategy.loss(images, torch.tensor([3, 4, 5, 5])).backward()
    assert not head.weight.grad[:3].any() and head.weight.grad[3:].any()
    again = build()
    again.load_state(strategy.state())
    assert again.net["backbone"].encoder.ln.eps == 1e-5
    assert torch.equal(again.snapshot()(images), strategy.snapshot()(images))


# --------------------------------------------------------------------------------------------------
# LwF

# A golden loss proves a formula; here training loops are compared with published update rules in
# plain float64 arithmetic, on fixed batches. They share no optimiser, scheduler or loss.


class TinyBackbone(nn.Module):
    """A convolution with batch-norm: as much of ResNet-18 as a training loop can see."""

    dim = 6

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, self.dim, 3, stride=2, bias=False)
        self.bn = nn.BatchNorm2d(self.dim)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x))).mean((2, 3))


class FixedTask:
    """A task whose epochs are always the same batches, the last one smaller."""

    sizes = 8, 8, 5
    dataset = SimpleNamespace(num_classes=9)

    def __init__(self, index, classes):
        self.index, self.classes = index, classes
        self.images = torch.randn(sum(self.sizes), 3, 8, 8, generator=gen(index))
        self.labels = torch.arange(len(self.images)) % len(classes) + classes.start

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index]

    def epoch(self, *_, **__):
        return zip(self.images.split(self.sizes), self.labels.split(self.sizes))

    def two_views(self, recipe):
        """Of the self-supervised, who drop the smaller batch."""

    def without_labels(self):
        views = copy.copy(self)
        views.epoch = lambda **_: ((x, x.flip(3)) for x in self.images.split(self.sizes)[:2])
        return views


@pytest.fixture
def loop(monkeypatch):
    """Learn two tasks with a strategy: (strategy, tasks, its state before each fit, its draws)."""
    torch.set_default_dtype(torch.float64)
    monkeypatch.setattr(strategies, "build_backbone", lambda settings, size: TinyBackbone())
    draws = {name: [] for name in ("randint", "randn_like", "randperm")}

    def run(name, **settings):
        strategy = make(name, batch_size=8, **settings)
        tasks = [FixedTask(0, range(4)), FixedTask(1, range(4, 6))]
        starts, fit = [], strategy.fit

        def recorded_fit(*args):
            starts.append(copy.deepcopy(strategy.net.state_dict()))
            with pytest.MonkeyPatch.context() as patch:
                for name in draws:
                    patch.setattr(torch, name, overheard(getattr(torch, name), draws[name]))
                fit(*args)

        strategy.fit = recorded_fit
        for task in tasks:
            strategy.learn(task)
        return strategy, tasks, starts, draws

    yield run
    torch.set_default_dtype(torch.float32)


def overheard(function, results):
    """The function, each of its results also appended to a list."""

    def wrapper(*args, **kwargs):
        results.append(function(*args, **kwargs))
        return results[-1].clone()

    return wrapper


def tiny_copy(state):
    """A TinyBackbone with the backbone's tensors of a state_dict."""
    net = TinyBackbone()
    net.load_state_dict({k[9:]: v.clone() for k, v in state.items() if k.startswith("backbone.")})
    return net


def as_published(strategy, backbone, others):
    """Every tensor of the strategy's network is the reference's, to 1e-9."""
    expected = {**nn.ModuleDict({"backbone": backbone}).state_dict(), **others}
    state = strategy.net.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert (state[name] - value.detach()).abs().max() < 1e-9, name


def log_softmax(z):
    return z - z.exp().sum(1, keepdim=True).log()


def mean_cross_entropy(z, y):
    return -log_softmax(z)[torch.arange(len(y)), y].mean()


def unit(x):
    return x / x.square().sum(1, keepdim=True).sqrt()


def decayed_rate(rate, milestones, epoch):
    return rate * 0.1 ** sum(epoch >= m for m in milestones)


class PlainOptimizer:
    """New for every task; weight decay is part of the gradient."""

    def __init__(self, params, decay):
        self.params, self.decay, self.t = params, decay, 0
        self.kept = [(torch.zeros_like(p), torch.zeros_like(p)) for p in params]

    def step(self, loss, rate):
        self.t += 1
        for p, g, kept in zip(self.params, torch.autograd.grad(loss, self.params), self.kept):
            p.data -= rate * self.direction(g + self.decay * p.detach(), *kept)


class PlainSGD(PlainOptimizer):
    def direction(self, g, velocity, _):
        return velocity.mul_(0.9).add_(g)


class PlainAdam(PlainOptimizer):
    def direction(self, g, m, s):
        m.mul_(0.9).add_(0.1 * g)
        s.mul_(0.999).add_(0.001 * g * g)
        m_hat, s_hat = m / (1 - 0.9 ** self.t), s / (1 - 0.999 ** self.t)
        return m_hat / (s_hat.sqrt() + 1e-8)


def test_lwf_trains_as_published(loop):
    """Cross-entropy on the new classes, distillation of all old ones at T = 2 without T^2, weight
    10; SGD and steps of the learning rate begin anew; sigma and batch-norm decay too."""
    strategy, tasks, starts, _ = loop(
        "lwf", first_epochs=4, first_milestones=(2, 3), epochs=3, lr=0.05, milestones=(1, 2))
    f = tiny_copy(starts[0])
    sigma = torch.ones(1, requires_grad=True)
    W = torch.empty(0, f.dim)
    for task, start in zip(tasks, starts):
        known = len(W)
        old = copy.deepcopy(f).eval(), W.detach().clone(), sigma.detach().clone()
        fresh = start["head.weight"][known:]  # the draw of new rows is ours
        W = torch.cat([W.detach(), fresh]).requires_grad_()
        rate, milestones, decay = (0.05, (1, 2), 2e-4) if task.index else (0.1, (2, 3), 5e-4)
        sgd = PlainSGD([*f.parameters(), W, sigma], decay)
        for epoch in range(4 - task.index):
            for x, y in task.epoch():
                z = sigma * unit(f(x)) @ unit(W).T
                loss = mean_cross_entropy(z[:, known:], y - known)
                if task.index:
                    with torch.no_grad():
                        z_old = old[2] * unit(old[0](x)) @ unit(old[1]).T
                    teacher = log_softmax(z_old / 2).exp()
                    loss = loss - 10 * (teacher * log_softmax(z[:, :known] / 2)).sum(1).mean()
                sgd.step(loss, decayed_rate(rate, milestones, epoch))
    as_published(strategy, f, {"head.weight": W, "head.sigma": sigma})


def test_golden_lwf_loss():
    g = golden("lwf_loss")
    logits = g["logits_new"].clone().requires_grad_()
    loss = strategies.lwf_loss(
        logits, g["logits_old"], g["targets"], g["lam"].item(), g["T"].item())
    loss.backward()
    agree(loss, g["total"])
    agree(logits.grad, g["grad_total"])


# --------------------------------------------------------------------------------------------------
# PASS


def test_golden_pass():
    g = golden("pass_loss")
    assert torch.equal(data.rotate4(g["images"]), g["rot_images"])
    head, feats = linear(g["fc_weight"], g["fc_bias"]), g["feats"].clone().requires_grad_()
    drawn = g["prototypes"][g["proto_index"]] + g["radius_task1"] * g["noise"]
    loss = strategies.pass_loss(head, feats, g["targets"], g["feats_old"], drawn, g["proto_index"])
    loss.backward()
    agree(loss, g["loss_total"])
    agree(feats.grad, g["grad_feats"])
    agree(head.weight.grad, g["grad_fc_weight"])
    agree(head.bias.grad, g["grad_fc_bias"])


def rotations(x):
    """Images (B, 3, H, W) -> (4B, 3, H, W), each turned by 0, 90, 180 and 270 degrees."""
    return torch.stack([torch.rot90(x, k, (2, 3)) for k in range(4)], 1).flatten(0, 1)


def test_pass_trains_as_published(loop):
    """Four rotations as classes, ||F - F_old|| over the batch, B floor(C_old / C_new) noisy
    prototypes per step, both weights 10, temperature 0.1; Adam, steps of its rate, anew each task;
    one forward per step."""
    strategy, tasks, starts, draws = loop(
        "pass", lr=1e-3, first_epochs=3, epochs=3, first_milestones=(2,), milestones=(1,))
    f = tiny_copy(starts[0])
    W, b = torch.empty(0, f.dim), torch.empty(0)
    means, traces = [], []
    for task, start in zip(tasks, starts):
        old, known = copy.deepcopy(f).eval(), len(W)
        W = torch.cat([W.detach(), start["head.weight"][known:]]).requires_grad_()
        b = torch.cat([b.detach(), torch.zeros(len(W) - known)]).requires_grad_()
        adam = PlainAdam([*f.parameters(), W, b], 2e-4)
        for epoch in range(3):
            for x, y in task.epoch():
                turned = rotations(x)
                targets = torch.stack([4 * y + k for k in range(4)], 1).flatten()
                feats = f(turned)
                loss = mean_cross_entropy((feats @ W.T + b) / 0.1, targets)
                if task.index:
                    c, noise = draws["randint"].pop(0), draws["randn_like"].pop(0)
                    assert len(c) == 8 * (4 // 2)
                    radius = torch.stack(traces).mean().sqrt()
                    drawn = torch.stack(means)[c] + radius * noise
                    distance = (feats - old(turned).detach()).square().sum().sqrt()
                    loss = loss + 10 * distance
                    loss = loss + 10 * mean_cross_entropy((drawn @ W.T + b) / 0.1, 4 * c)
                adam.step(loss, decayed_rate(1e-3, (1,) if task.index else (2,), epoch))
        feats = copy.deepcopy(f).eval()(task.images).detach()
        for c in task.classes:
            own = feats[task.labels == c]
            means.append(own.mean(0))
            traces.append(torch.cov(own.T).trace() / f.dim)
    assert not draws["randint"]
    as_published(strategy, f, {"head.weight": W, "head.bias": b})


def test_golden_pass_memory_and_prediction():
    """Two tasks through finish(): the radius takes in new classes; every fourth logit counts."""
    g, strategy = golden("pass_loss"), make("pass")
    classes, old = g["class_features"], int(g["n_old"])
    for part in (range(old), range(old, len(classes))):
        strategy.task_features = lambda task: classes[list(part)].flatten(0, 1)
        labels = torch.repeat_interleave(torch.tensor(part), classes.shape[1])
        strategy.finish(SimpleNamespace(labels=labels, classes=part))
        radius = g["radius_task2" if part.start else "radius_task1"]
        agree(strategy.memory["variance"].mean().sqrt(), radius)
    agree(strategy.memory["means"], g["prototypes"])
    strategy.net["head"] = linear(g["fc_weight"], g["fc_bias"])
    assert torch.equal(strategy.classify(g["feats"]), g["pred"])


def test_pass_learns_from_its_labelled_images_alone():
    task, = short_tasks(1)
    strategy, seen = brief("pass", label_fraction=0.25), []
    loss = strategy.loss
    strategy.loss = lambda x, y: seen.append(len(x)) or loss(x, y)
    strategy.learn(task)
    assert strategy.prototype_labels == (0.25,) and sum(seen) == 5 * 2
    index, labels = task.labelled(0.25, 0)
    feats = strategy.snapshot()(task[index])
    agree(strategy.memory["means"], ldc.class_means(feats, labels, range(5)), 1e-5)


# --------------------------------------------------------------------------------------------------
# FeTrIL and FeCAM


def test_golden_fetril():
    g = golden("fetril")
    old = int(g["n_old"])
    feats, labels = strategies.fetril_features(
        g["features_new"], g["labels_new"], range(old, old + 4), g["old_means"])
    agree(feats, g["train_features"])
    assert torch.equal(labels, g["train_labels"])


def test_golden_fecam():
    g = golden("fecam")
    groups = strategies.by_class(g["train_features"], g["train_labels"], range(6))
    inverses = torch.stack([strategies.fecam_inverse(group) for group in groups])
    agree(torch.linalg.pinv(inverses[0].double(), hermitian=True), g["cov0_normalised"])
    agree(strategies.fecam_distance(g["test_features"], g["class_means"], inverses), g["dist"])


def test_golden_fecam_predicts_by_the_cosine_head_at_first():
    g, strategy = golden("fecam"), make("fecam")
    strategy.net["head"].weight = nn.Parameter(g["head_weight_task1"])
    for part, expected in ((range(4), g["pred_task1"]), (range(4, 6), g["pred"])):
        member = (g["train_labels"] >= part.start) & (g["train_labels"] < part.stop)
        strategy.task_features = lambda task: g["train_features"][member]
        strategy.finish(SimpleNamespace(labels=g["train_labels"][member], classes=part))
        assert torch.equal(strategy.classify(g["test_features"]), expected)
    assert strategy.memory["inverses"].dtype == torch.float32


@pytest.mark.parametrize("feats,words", [
    (-torch.rand(10, 64), "use resnet18"), (torch.rand(1, 64), "at least two images")])
def test_fecam_refuses_what_it_cannot_use(feats, words):
    strategy = make("fecam")
    strategy.task_features = lambda task: feats
    with pytest.raises(data.UserError, match=words):
        strategy.finish(SimpleNamespace(labels=torch.zeros(len(feats)), classes=range(1)))


# --------------------------------------------------------------------------------------------------
# EFC


def test_golden_efc_matrix_and_drift():
    g = golden("efc")
    agree(strategies.feature_matrix(g["features"], g["head_weight"], int(g["batch_size"])), g["E"])
    moved = strategies.efc_drift(
        g["prototypes"], g["feats_old"], g["feats_new"], g["E"], g["sigma"].item())
    agree(moved - g["prototypes"], g["drift"])


def test_golden_efc_loss_and_rotations():
    g = golden("efc")
    head, feats = linear(g["head_weight"]), g["c_feats"].clone().requires_grad_()
    n, known = int(g["c_n_proto"]), int(g["head_sizes"][:-1].sum())
    loss = strategies.efc_loss(head, feats, g["c_feats_old"], g["c_targets"], g["c_proto"][:n],
                               g["c_proto_labels"][:n], g["E"], known)
    loss.backward()
    agree(loss, g["c_loss_new"] + g["c_loss_all"] + g["c_loss_reg"])
    agree(feats.grad, g["c_grad_feats"])
    agree(head.weight.grad, g["c_grad_head"])
    y, turned = g["rot_targets"], g["rot_out_targets"]
    classes = int(turned[0] - 3 * y[0])  # stored labels are C_1 + 3y + k - 1
    labels = strategies.efc_rotations(y, classes).view(-1, 4)
    assert torch.equal(labels, torch.cat([y[:, None], turned.view(-1, 3)], 1))


def efc_first_task(f, task, start):
    """Train the backbone with turned images as classes of an auxiliary layer; the head (C, d)."""
    W = start["head.weight"].clone().requires_grad_()
    turned_W = start["rotations.weight"].clone().requires_grad_()
    turned_b = start["rotations.bias"].clone().requires_grad_()
    adam = PlainAdam([*f.parameters(), W, turned_W, turned_b], 2e-4)
    for epoch in range(3):
        for x, y in task.epoch():
            labels = torch.stack([y, *(4 + 3 * y + k - 1 for k in (1, 2, 3))], 1).flatten()
            feats = f(rotations(x))
            z = torch.cat([feats @ W.T, feats @ turned_W.T + turned_b], 1)
            adam.step(mean_cross_entropy(z, labels), decayed_rate(1e-3, (2,), epoch))
    return W.detach()


def efc_memory(f, task, W):
    """What EFC keeps of its first task: class means, Cholesky factors of the covariances, E."""
    feats = f(task.images).detach()
    means, factors = [], []
    for c in task.classes:
        own = feats[task.labels == c]
        means.append(own.mean(0))
        factors.append(torch.linalg.cholesky(torch.cov(own.T) + 1e-5 * torch.eye(f.dim)))
    E = torch.zeros(f.dim, f.dim)
    for p in log_softmax(feats[:16] @ W.T).exp():  # full batches only
        E += W.T @ (p.diag() - p[:, None] * p) @ W / 16
    return means, factors, E


def test_efc_trains_as_published(loop):
    """After task 1 batch-norm stands still; new head + PR-ACE over all heads +
    (f - f_old)^T (10 E + 0.1 I) (f - f_old); Adam at 1e-4."""
    strategy, tasks, starts, draws = loop(
        "efc", first_lr=1e-3, first_epochs=3, first_milestones=(2,), epochs=3)
    f = tiny_copy(starts[0])
    W = efc_first_task(f, tasks[0], starts[0])
    f.eval()
    means, factors, E = efc_memory(f, tasks[0], W)
    old, rng, previous = copy.deepcopy(f), random.Random(1), None
    W = torch.cat([W, starts[1]["head.weight"][4:]]).requires_grad_()
    adam = PlainAdam([f.conv.weight, W], 2e-4)  # nothing of batch-norm learns
    for epoch in range(3):
        for x, y in tasks[1].epoch():
            n, older = 8, (x[:0], y[:0])
            if previous:
                ids = rng.sample(range(6), 6)
                ids = ids + ids[:8 - 6]
                n = sum(i < 4 for i in ids)
                older = previous[0][:8 - n], previous[1][:8 - n]
            previous = x, y
            balanced = draws["randperm"].pop(0).repeat(2)
            c = balanced[draws["randperm"].pop(0)][:n]
            noise = draws["randn_like"].pop(0)
            drawn = torch.stack([means[k] + factors[k] @ e for k, e in zip(c.tolist(), noise)])
            feats, older_feats = f(x), f(older[0])
            delta = feats - old(x).detach()
            pull = torch.einsum("bi,ij,bj->b", delta, 10 * E + 0.1 * torch.eye(f.dim), delta).mean()
            new = mean_cross_entropy((feats @ W.T)[:, 4:], y - 4)
            every = mean_cross_entropy(torch.cat([drawn, older_feats]) @ W.T,
                                       torch.cat([c, older[1]]))
            adam.step(new + every + pull, 1e-4)
    assert not draws["randn_like"]
    as_published(strategy, f, {"head.weight": W})
    feats = [net(tasks[1].images).detach() for net in (old, f)]
    moved = strategies.efc_drift(torch.stack(means), *feats, E)
    agree(strategy.memory["means"][:4], moved, 1e-9)
    agree(strategy.memory["E"], efc_memory(f, tasks[1], W.detach())[2], 1e-9)


def test_efc_rates_of_imagenet100():
    """The heads have a rate of their own after the first task only."""
    strategy = make("efc", **{**settings_of("efc", "imagenet100", "paper"), "width": 2})
    found = []
    for t in (0, 1):
        strategy.start(FixedTask(t, range(3)))
        optimizer, scheduler = strategy.optimizer(SimpleNamespace(index=t))
        rates = [group["lr"] for group in optimizer.param_groups]
        found.append((type(optimizer), rates, sorted(scheduler.milestones)))
        strategy.memory = {"E": None}
    assert found == [(torch.optim.SGD, [0.1], [80, 120, 150]),
                     (torch.optim.Adam, [1e-5, pytest.approx(1e-4)], [])]


# --------------------------------------------------------------------------------------------------
# Barlow Twins, PFR, CaSSLe, POCON


def leaves(*tensors):
    return [tensor.clone().requires_grad_() for tensor in tensors]


def with_stored(net, g, prefix):
    """The network with the stored weights; a bias not stored is zero."""
    for index, layer in enumerate([net] if isinstance(net, nn.Linear) else net):
        if isinstance(layer, (nn.Linear, nn.BatchNorm1d)):
            layer.weight.data.copy_(g[f"{prefix}_{index}_weight"])
            layer.bias.data.copy_(g.get(f"{prefix}_{index}_bias", torch.zeros(1)))
    return net


def trainer(name, views, **changes):
    """A strategy whose loss is a function of two feature matrices; the network of a target is its
    features of both."""
    strategy = make(name, width=2, **changes)  # 16 features
    strategy.embed = lambda x, backbone: x
    strategy.frozen_tap = lambda target, x: target.net[x is views[1]]
    strategy.net["projector"] = nn.Identity()
    strategy.trained = strategy.net
    return strategy


def test_golden_barlow():
    g = golden("barlow")
    for name, lam, scale in (("0", 0.005, 0.1), ("pocon", 0.0051, 0.025)):
        z1, = leaves(g["z1"])
        loss = strategies.barlow_twins_loss(z1, g["z2"], lam, scale)
        loss.backward()
        agree(loss, g[f"loss_{name}"])
        agree(z1.grad, g[f"grad_z1_{name}"])


def test_norms_have_a_gradient_at_zero():
    feats, y = torch.rand(4, 6).requires_grad_(), torch.zeros(1, dtype=torch.long)
    old = feats.detach().clone()
    for loss in (strategies.pass_loss(linear(torch.rand(8, 6)), feats, y, old, old[:1], y),
                 strategies.frobenius_distance(feats, old)):
        gradient, = torch.autograd.grad(loss, feats)
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("name,piece,u", [
    ("cassle", "cassle_distill", "z"), ("pfr", "pfr_loss", "f")])
def test_golden_cassle_and_pfr(name, piece, u):
    g = golden(piece)
    views = leaves(g[u + "1"], g[u + "2"])
    strategy = trainer(name, views)
    predictor = strategy.build_predictor() if name == "pfr" else strategies.mlp(16, 24, 16)
    strategy.net["predictor"] = with_stored(predictor, g, "pred")
    strategy.targets = [strategy.target((g[f"frozen_{u}1"], g[f"frozen_{u}2"]))]
    total = strategy.loss(*views)
    total.backward()
    agree(total, g["loss_total"])
    agree(views[0].grad, g[f"grad_total_{u}1"])
    agree(views[1].grad, g[f"grad_total_{u}2"])
    weight = 25 if name == "pfr" else 1
    agree(predictor[0].weight.grad, weight * g["grad_distill_pred_0_weight"])


def test_golden_pocon():
    g = golden("pocon_loss")
    views = leaves(g["f1"], g["f2"])
    pocon = trainer("pocon", views, retrospection="linear", lambda_retrospection=25.0)
    with_stored(pocon.net["retrospection"], g, "cmd_r")
    adaptation = with_stored(pocon.build_adaptation(), g, "cmd_a")
    pocon.build_adaptation = lambda: adaptation
    for t, part in enumerate(("adapt", "total")):
        pocon.targets = []
        list(pocon.phases(SimpleNamespace(index=t)))  # prepares both
        for target, outputs in zip(pocon.targets, ("expert", "old")):
            assert not any(m.training for m in target.net.modules())
            target.net = g[f"{outputs}_f1"], g[f"{outputs}_f2"]
        loss = pocon.loss(*views)
        agree(loss, g[f"cmd_loss_{part}"])
        for i, gradient in enumerate(torch.autograd.grad(loss, views), 1):
            agree(gradient, g[f"cmd_grad_{part}_f{i}"])


def plain_barlow(z1, z2):
    z1, z2 = ((z - z.mean(0)) / (z.var(0, unbiased=False) + 1e-5).sqrt() for z in (z1, z2))
    C = z1.T @ z2 / len(z1)
    beside = C - C.diagonal().diag()
    return 0.1 * ((C.diagonal() - 1).square().sum() + 0.005 * beside.square().sum())


def cassle_step(params, velocity, loss, rate):
    """CaSSLe's LARS: clipped, no adaptation and no decay of biases and batch-norm."""
    for k, (p, g) in enumerate(zip(params, torch.autograd.grad(loss, params))):
        if p.ndim > 1:
            norm = p.detach().norm()
            ratio = 0.02 * norm / (g.norm() + 1e-4 * norm + 1e-8)
            g = (ratio / rate).clamp(max=1) * (g + 1e-4 * p.detach())
        velocity[k] = 0.9 * velocity[k] + g
        p.data -= rate * velocity[k]


@pytest.mark.parametrize("name", ["cassle", "pfr"])
def test_self_supervised_distillation_trains_as_published(name, loop):
    """Barlow Twins, then also the predictor's distance to the frozen network, whose batch-norm has
    the batch's statistics; LARS; two epochs of warm-up, then a cosine."""
    strategy, tasks, starts, _ = loop(name, projector_width=5, first_epochs=4, epochs=4, lr=0.3,
                                      warmup_epochs=2, warmup_lr=0.003)
    net = copy.deepcopy(strategy.net)
    predictor = net["predictor"]
    for task, start in zip(tasks, starts):
        if task.index == 0:
            del net["predictor"]  # which begins with the second task
        else:
            old = copy.deepcopy(net).train()
            net["predictor"] = predictor
        net.load_state_dict(start)
        params = list(net.parameters())
        velocity = [torch.zeros_like(p) for p in params]
        for rate in (0.003, 0.3, 0.3, 0.15):
            for views in task.without_labels().epoch():
                f = [net["backbone"](x) for x in views]
                z = [net["projector"](u) for u in f]
                loss = plain_barlow(*z)
                for x, u, v in zip(views, f, z) if task.index else ():
                    frozen = old["backbone"](x).detach()
                    if name == "pfr":
                        loss = loss - 25 / 2 * (unit(predictor(u)) * unit(frozen)).sum(1).mean()
                    else:
                        frozen = old["projector"](frozen).detach()
                        loss = loss + 1 / 2 * plain_barlow(predictor(v), frozen)
                cassle_step(params, velocity, loss, rate)
    as_published(strategy, net["backbone"], net.state_dict())


@pytest.mark.parametrize("name,trust,after", [
    ("cassle", 0.02, "after_clip"), ("nncsl", 0.001, "after")])
def test_golden_lars(name, trust, after):
    """Four steps with the stored gradients and learning rates end where the original's did."""
    g, cassle = golden("lars_" + name), name == "cassle"
    params = {k[5:]: nn.Parameter(v.clone()) for k, v in g.items() if k.startswith("init_")}
    groups = [{"params": []}, {"params": [], "plain": True}, {"params": [], "weight_decay": 0.0}]
    for key, p in params.items():
        kind = 2 if "classifier" in key else "bias" in key or "bn" in key
        groups[kind]["params"].append(p)
    rates = [g["lrs"]] * 2 if cassle else [g["lr_main"], g["lr_main"], g["lr_classifier"]]
    optimizer = strategies.LARS(groups[:len(rates)], 1.0, g["wd"].item(), trust, clip=cassle,
                                lr_in_velocity=not cassle)
    for i in range(4):
        for group, lr in zip(optimizer.param_groups, rates):
            group["lr"] = lr[i].item()
        for key, p in params.items():
            p.grad = g[f"grads_{key}"][i].clone()
        optimizer.step()
        for key, p in params.items():
            agree(p, g[f"{after}_{key}"][i])


def test_golden_cassle_schedule():
    g = golden("ssl_schedule")
    for (base, epochs, warmup, start), expected in zip(g["cfg"].tolist(), (g["lr_0"], g["lr_1"])):
        ours = [strategies.cassle_lr(e, base, epochs, warmup, start) for e in range(int(epochs))]
        agree(torch.tensor(ours), expected)


@pytest.mark.parametrize("name,dataset,uniform", [
    ("cassle", "cifar100", True), ("cassle", "imagenet100", False), ("nncsl", "cifar100", False)])
def test_first_convolution(name, dataset, uniform):
    """On CIFAR self-supervised code gives it nn.Conv2d's initialisation; elsewhere, in NNCSL and
    where there are labels, it is Kaiming's by fan-out."""
    weight = make(name, dataset, width=32).net["backbone"].conv1.weight
    std = 1 / 9 if uniform else math.sqrt(2 / (32 * weight.shape[2] ** 2))
    assert weight.std().item() == pytest.approx(std, rel=0.1)
    assert (weight.abs().max() < 1.8 * std) == uniform


def test_predictor_begins_with_the_second_task_and_persists():
    """From the second task on."""
    strategy, predictors = brief("cassle"), []
    for task in short_tasks(3):
        strategy.learn(task)
        predictors.append(dict(strategy.net).get("predictor"))
    assert predictors[0] is None and predictors[1] is predictors[2] is not None


def test_pocon_phases():
    """Expert and main network start from different draws, in later tasks the expert from a copy of
    the main network; while one learns the other rests, each with views of its own."""
    pocon = make("pocon", first_expert_epochs=4, expert_epochs=3, first_epochs=1, epochs=2)
    fit, loss, phases, views = pocon.fit, pocon.loss, [], []

    def watched_fit(index, optimizer, scheduler, epochs, *rest):
        nets = [pocon.net, pocon.trained, *(target.net for target in pocon.targets)]
        states = [copy.deepcopy(net["backbone"].state_dict()) for net in nets]
        phases.append((epochs, *states))
        fit(index, optimizer, scheduler, epochs, *rest)

    pocon.fit = watched_fit
    pocon.loss = lambda *batch: views.append(batch[0]) or loss(*batch)
    for task in short_tasks(2):
        pocon.learn(task)
    assert [epochs for epochs, *_ in phases] == [4, 1, 3, 2]
    assert not torch.equal(views[0], views[4])
    _, main, expert = phases[0]  # at seed 0, where the two once began alike
    assert not torch.equal(main["layer1.0.conv1.weight"], expert["layer1.0.conv1.weight"])
    assert not main["layer2.1.bn2.weight"].any() and not expert["layer2.1.bn2.weight"].any()
    (_, main, expert), (_, rested, _, taught, old) = phases[2:]
    assert same_tensors(main, expert) and same_tensors(main, rested) and same_tensors(main, old)
    assert not same_tensors(main, taught)
    assert not same_tensors(main, pocon.net["backbone"].state_dict())


@pytest.mark.parametrize("name", ["cassle", "pocon", "nncsl"])
def test_training_never_reads_a_hidden_label(name, monkeypatch):
    """The only way to a label is labelled(), which only NNCSL asks, for its own share."""
    task, = short_tasks(1)
    strategy, asked, labelled = brief(name), [], data.Task.labelled
    with pytest.raises(RuntimeError, match="no labels"):
        strategy.visible(task).labels
    monkeypatch.setattr(data.Task, "labels", property(lambda self: pytest.fail("a label was read")))
    monkeypatch.setattr(data.Task, "labelled",
                        lambda self, *a: asked.append(a) or labelled(self, *a))
    strategy.learn(task)
    assert bool(asked) == (name == "nncsl")
    assert all(a == (strategy.settings.label_fraction, 0) for a in asked)


def test_leak_moves_batch_norm_only_where_asked_for():
    """With the leak, one more forward per step, of images gathered once, not every epoch."""
    task, = short_tasks(1)
    read, images_of = [], task.dataset.train_images
    task.dataset.train_images = lambda c: read.append(c) or images_of(c)
    for leak in (False, True):
        strategy = brief("cassle", bn_leak=leak)
        strategy.start(task)
        one_batch(strategy, task)
        strategy.loss(*one_batch(strategy, task))
        assert sorted(read) == (list(range(task.dataset.num_classes)) if leak else [])
        assert strategy.net["backbone"].bn1.num_batches_tracked == 2 + leak


# --------------------------------------------------------------------------------------------------
# NNCSL


@pytest.mark.parametrize("case", ["buf", "nobuf"])
def test_golden_nncsl(case):
    g = {k.removeprefix(case + "_"): v for k, v in golden("nncsl").items()}
    labels, current = g["support_labels"], len(g["current_classes"])
    K = len(labels.unique())
    # current classes last, otherwise as they come
    order = torch.arange(K)[torch.argsort((labels[:K] >= 6).long(), stable=True)]
    z, support, logits = leaves(g["z_views"], g["z_support"], g["logits_support"])
    parts = [s.unflatten(0, (6, K))[:, order]
             for s in (support, g["old_z_support"], logits, labels)]
    seen = int(labels.max()) + 1
    loss = strategies.nncsl_loss(z, parts[0], parts[2].flatten(0, 1)[:, :seen], parts[3].flatten(),
                                 current, g["old_z_views"], parts[1])
    loss.backward()
    agree(loss, g["loss_total"])
    agree(z.grad, g["grad_z_views"])
    agree(support.grad, g["grad_z_support"])
    agree(logits.grad, g["grad_logits_support"])


def test_golden_nncsl_schedule():
    g = golden("ssl_schedule")
    start, peak, final, _, warmup, epochs, per_epoch = g["nncsl_cfg"].tolist()
    ours = [strategies.nncsl_lr(s, peak, epochs * per_epoch, warmup * per_epoch, start, final)
            for s in range(len(g["nncsl_lr_main"]))]
    agree(torch.tensor(ours), g["nncsl_lr_main"])


@pytest.mark.parametrize("size", [0, 7])
def test_nncsl_buffer(size):
    """Never more than its size, balanced to one, labelled images only; with none, no old label
    reaches a step."""
    strategy, known = brief("nncsl", buffer_size=size, label_fraction=0.5), []
    *tasks, last = short_tasks(3)
    for task in tasks:
        index, labels = task.labelled(0.5, 0)
        known += zip(task.images[index], labels.tolist())
        strategy.learn(task)
        images, kept = strategy.memory["images"], strategy.memory["labels"]
        counts = kept.bincount(minlength=task.classes.stop)
        assert len(images) == len(kept) == size and counts.max() - counts.min() <= 1
        for image, label in zip(images, kept.tolist()):
            assert any(label == c and torch.equal(image, other) for other, c in known)
    strategy.start(strategy.visible(last))
    *_, s1, s2, y = one_batch(strategy, last)
    expected = sorted({*last.classes, *kept.tolist()})
    assert y.tolist() == expected * 3 and len(s1) == len(s2) == len(y)


def test_nncsl_support(monkeypatch):
    """Three images of each class, distinct where there are enough labels, in two views; their
    indices reach the device by data.to_device alone, pinned and asynchronous on CUDA."""
    task, = short_tasks(1)
    strategy, moved = brief("nncsl", label_fraction=0.5), []
    strategy.start(task)
    monkeypatch.setattr(strategies, "to_device", overheard(data.to_device, moved))
    *views, y = one_batch(strategy, task)
    support, = moved
    assert len(views) == 6 and torch.equal(strategy.labelled_images(task)[1][support], y)
    assert len(support) == len(support.unique()) == 15


def test_nncsl_head_has_rows_for_all_classes_from_the_start(monkeypatch):
    """Drawn as nn.Linear draws them, weight and bias; only classes seen are trained, predicted."""
    strategy, seen, loss = brief("nncsl"), [], strategies.nncsl_loss
    monkeypatch.setattr(strategies, "nncsl_loss",
                        lambda *args: seen.append(args[2].shape[1]) or loss(*args))
    first, second = short_tasks(2)
    strategy.start(strategy.visible(first))
    head, bound = strategy.net["head"], 1 / math.sqrt(strategy.dim)
    assert len(head.weight) == len(head.bias) == first.dataset.num_classes
    for values in (head.weight, head.bias):
        assert 0.8 * bound < values.abs().max() <= bound and values.min() < 0 < values.max()
    for task in (first, second):
        strategy.learn(task)
        assert seen[-1] == task.classes.stop
    assert strategy.classify(100 * head.weight[-1:].detach()) < second.classes.stop


def test_nncsl_scales_the_weight_of_a_shortcuts_batch_norm():
    strategy, task = brief("nncsl"), FixedTask(0, range(5))
    strategy.start(task)
    scaled, plain, _ = (set(group["params"]) for group in strategy.optimizer(task)[0].param_groups)
    norm = strategy.net["backbone"].layer2[0].downsample[1]
    assert norm.weight in scaled and norm.bias in plain


class PlainNncsl(strategies.Nncsl):
    """With a plain loss and plain batches, so that only NNCSL's optimiser remains to compare."""

    def loss(self, x, y):
        feats = self.embed(x)
        z = self.net["projector"](feats)
        return F.cross_entropy(self.net["head"](feats), y) + z.square().mean()

    def batches(self, task, generator):
        return task.epoch()

    def visible(self, task):
        return task

    def labelled_images(self, task):
        return task.images[:1], task.labels[:1]


def nncsl_rate(step):
    """From 0.08 to 0.6 in an epoch of two whole batches, then to 0.032 by a cosine of two."""
    if step < 2:
        return 0.08 + (0.6 - 0.08) * step / 2
    return 0.032 + (0.6 - 0.032) / 2 * (1 + math.cos(math.pi * min(1, (step - 2) / 4)))


def nncsl_step(params, velocity, loss, rate):
    """NNCSL's LARS: the rate inside the velocity; the head not decayed, at a tenth of the rate."""
    for (name, p), g in zip(params.items(), torch.autograd.grad(loss, list(params.values()))):
        head = name.startswith("head")
        decay = 0 if head else 1e-2
        if head or p.ndim > 1:
            norm = p.detach().norm()
            g = 0.001 * norm / (g.norm() + decay * norm + 1e-8) * (g + decay * p.detach())
        velocity[name] = 0.9 * velocity[name] + rate * (0.1 if head else 1) * g
        p.data -= velocity[name]


def test_nncsl_optimises_as_published(loop, monkeypatch):
    """Velocities outlive the task; warm-up and cosine by steps, anew each task."""
    monkeypatch.setitem(strategies.STRATEGIES, "plain", PlainNncsl)
    strategy, tasks, starts, _ = loop("plain", first_epochs=3, epochs=3, warmup_epochs=1,
                                      buffer_size=0, weight_decay=1e-2, lr=0.6)
    net = copy.deepcopy(strategy.net)
    net.load_state_dict(starts[0])
    params = dict(net.named_parameters())
    velocity = {name: torch.zeros_like(p) for name, p in params.items()}
    for task in tasks:
        net.train(task.index == 0)
        for step, (x, y) in enumerate([*task.epoch()] * 3):
            feats = net["backbone"](x)
            loss = mean_cross_entropy(net["head"](feats), y)
            loss = loss + net["projector"](feats).square().mean()
            nncsl_step(params, velocity, loss, nncsl_rate(step))
        if task.index == 0:
            order = torch.randperm(21, generator=gen()).repeat(48)
            for index in order[:1000].split(100):
                net["projector"](net["backbone"](task.images[index]))
    as_published(strategy, net["backbone"], net.state_dict())


# --------------------------------------------------------------------------------------------------
# Devices: CUDA cannot run everywhere, but fake CUDA tensors raise wherever two devices mix

FAKE = torch._subclasses.fake_tensor.FakeTensorMode()


def fake_to(module, device, **_):
    """nn.Module.to for fake parameters, which torch cannot move in place."""
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in list(held.items()):
                if tensor is None:
                    continue
                moved = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                held[name] = nn.Parameter(moved) if isinstance(tensor, nn.Parameter) else moved
    return module


@pytest.fixture
def fake_cuda(monkeypatch):
    """Tensors on "cuda" have shapes but no data; backward passes, which need a device, do nothing.
    """
    skip_where_cuda_cannot_be_faked()
    monkeypatch.setattr(nn.Module, "to", fake_to)
    # copies stay in the mode
    monkeypatch.setattr(type(FAKE), "__deepcopy__", lambda self, memo: self, raising=False)
    monkeypatch.setattr(torch.Tensor, "backward", lambda self: None)
    monkeypatch.setattr(torch.autograd, "grad", lambda loss, x: (torch.zeros_like(x),))
    with FAKE:
        yield


class CudaTask(FixedTask):
    """As much of a task as an optimiser and a compensator look at, on fake CUDA."""

    dataset = SimpleNamespace(num_classes=10)
    pixel_range = 0.0, 1.0

    def __init__(self, index=0, classes=range(5)):
        self.index, self.classes = index, classes
        self.images = self.clean_images = torch.rand(40, 3, 2, 2, device="cuda")

    def clean(self, images, generator=None):
        return images

    augment = clean


def batch_for(strategy, classes):
    """A batch as the strategy's loss takes it: images and labels, two views, or NNCSL's seven."""
    def image(n, side=16):
        return torch.rand(n, 3, side, side, device="cuda")

    labels = torch.arange(classes.start, classes.stop, device="cuda")
    views = image(8), image(8)
    if isinstance(strategy, strategies.BarlowTwins):
        return views
    if isinstance(strategy, strategies.Nncsl):  # 3 images of 5 classes
        return *views, image(8, 9), image(8, 9), image(15), image(15), labels.repeat(3)
    return image(5), labels


@every_strategy
def test_training_step_stays_on_one_device(name, fake_cuda):
    """Fake tensors also raise where a value is read on the host."""
    strategy = make(name, device="cuda")
    cuda = functools.partial(torch.rand, device="cuda")
    tasks = CudaTask(), CudaTask(1, range(5, 10))
    for task in tasks[:1] if strategy.frozen_after_first else tasks:
        strategy.start(task)
        for _ in strategy.phases(task):
            for _ in range(2):
                assert strategy.loss(*batch_for(strategy, task.classes)).device.type == "cuda"
            optimizer, _ = strategy.optimizer(task)
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                p.grad = torch.zeros_like(p)  # backward() would ask for a real device
            optimizer.step()
        strategy.memory.update(means=cuda(5, 64), variance=cuda(5), factors=cuda(5, 64, 64),
                               E=cuda(64, 64))
    with pytest.raises(Exception, match="device"):
        batch = batch_for(strategy, task.classes)
        strategy.loss(*(part.cpu() if part.ndim == 4 else part for part in batch))


def test_features_are_float32_whatever_the_training_precision():
    """Autocast rounds the convolutions of training, not their mean; snapshots are not rounded."""
    strategy, plain, images = make("lwf", amp=True), make("lwf"), torch.randn(8, 3, 16, 16)
    with torch.no_grad():
        trained, exact = strategy.embed(images), plain.embed(images)
    assert trained.dtype == torch.float32 and not torch.equal(trained, trained.bfloat16().float())
    assert 0 < (trained - exact).abs().max() < 0.05 * exact.abs().max()
    strategy.net.load_state_dict(plain.net.state_dict())
    assert torch.equal(strategy.snapshot()(images), plain.snapshot()(images))


@pytest.mark.parametrize("name", FREE)
def test_compensators_stay_on_one_device(name, fake_cuda):
    options = {**run.preset_options("lwf", "demo", "smoke"), "ldc_epochs": 1}
    cuda = functools.partial(torch.rand, device="cuda")
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 6, device="cuda"))
    drift = run.Drift(cuda(40, 6), cuda(40, 6), SimpleNamespace(**options), 0, model, model,
                      CudaTask(), phi=cuda(40, 5))
    width = 11 if "anchor" in run.needed([name]) else 6
    moved = run.COMPENSATORS[name](cuda(3, width), drift)
    assert moved.shape == (3, width) and moved.device.type == "cuda"
    assert ldc.ncm(cuda(5, 6), moved[:, -6:]).device.type == "cuda"
    assert beyond.lda(cuda(5, 6), moved[:, -6:], cuda(6, 6).double()).device.type == "cuda"


# --------------------------------------------------------------------------------------------------
# One run: learning, rows, labels

SMOKE = ["--scale", "smoke", "--tasks", "3", "--device", "cpu"]
QUICK = [*SMOKE, "--compensators", "none", "ldc", "ldc-ridge", "ldc-anchor", "nme-5", "oracle"]
BRIEF = ["--scale", "smoke", "--tasks", "10", "--limit", "5", "--device", "cpu"]
SEED0 = Path("smoke", "demo", "lwf", "seed0")


def metrics(folder):
    """What must repeat to the last bit: all of result.json but times, memory and provenance."""
    result = json.loads((folder / "result.json").read_text())
    kept = ("finished", "tasks_done", "rows", "class_order", "settings", "options", "changed")
    return {key: result[key] for key in kept}


def finished(tmp_path_factory, *flags):
    out = tmp_path_factory.mktemp("runs")
    assert run.main([*flags, "--out-dir", str(out)]) == 0
    return out / SEED0


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """One finished smoke run with all rows, which kept its features."""
    return finished(tmp_path_factory, *SMOKE, "--compensators", "all", "--keep-features")


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """One finished smoke run with a few rows."""
    return finished(tmp_path_factory, *QUICK)


def resolved(*flags):
    args = run.build_parser().parse_args(list(flags))
    run.resolve(args)
    return args


def open_run(*flags, dataset=None):
    """A run as the command line would make it, without its files."""
    args = resolved(*flags)
    loaded = run.open_data(args)
    return run.Run(args, dataset or loaded, args.seed[0])


def complaint(capsys, *flags):
    """The one sentence with which the command line refuses something."""
    capsys.readouterr()
    assert run.main(list(flags)) == 2
    sentence, = (line for line in capsys.readouterr().err.splitlines() if line[:5] != "task ")
    assert sentence.startswith("error: ")
    return sentence


def rows_of(one, labels="1"):
    """Row -> its curves, of one set of labels."""
    return run.result_rows(one.rows)[labels]


def test_learning_floor():
    """After two tasks of the demo, LDC beats prototypes left alone and does not beat the oracle.

    Removing the compensation, COMPENSATORS["ldc"] = lambda p, drift: p, fails this test.
    """
    one = open_run("--seed", "2", "--limit", "100", "--first-epochs", "12", "--epochs", "8",
                   "--compensators", "none", "ldc", "ldc-ridge", "oracle")
    for _ in range(2):
        one.step()
    rows = rows_of(one)
    first, second = ({name: row["accuracy"][t] for name, row in rows.items()} for t in (0, 1))
    assert first["none"] > 70  # the backbone learns
    assert second["pixels"] < second["none"]
    for name in ("ldc", "ldc-ridge"):
        assert second["none"] + 1.5 < second[name] < second["oracle"] + 1
        moved, left_alone = (sum(rows[n]["oracle_distance"][1][:10]) for n in (name, "none"))
        assert moved < 0.8 * left_alone


def test_self_supervised_learning_floor():
    """Barlow Twins beats a random backbone; then LDC undoes CaSSLe's drift, label or no label.

    Removing the compensation, or the views (two copies of each image), fails this test.
    """
    one = open_run("--strategy", "cassle", "--seed", "2", "--limit", "100", "--first-epochs", "10",
                   "--epochs", "5", "--compensators", "none", "ldc", "oracle")
    task = one.stream.task(0)
    images, labels = next(iter(one.stream.test(0)))
    untrained = one.strategy.snapshot()
    feats = run.features(untrained, task.images, task.clean)
    test = run.features(untrained, images, task.clean)
    prototypes = ldc.class_means(feats, task.labels, task.classes)
    random_backbone = run.accuracy(ldc.ncm(test, prototypes), labels)
    for _ in range(2):
        one.step()
    assert rows_of(one)["none"]["accuracy"][0] > random_backbone + 6  # 9.5 (torch 2.5), over 10
    for labels in ("0.25", "1"):
        none, moved, oracle = (rows_of(one, labels)[name] for name in ("none", "ldc", "oracle"))
        assert none["accuracy"][1] < moved["accuracy"][1] < oracle["accuracy"][1] + 1
        distance = sum(moved["oracle_distance"][1][:10])
        assert distance < 0.5 * sum(none["oracle_distance"][1][:10])


def test_nncsl_forgets_without_a_buffer():
    """Its own classifier, after two tasks: without a buffer every image goes to the last task."""
    with_buffer = open_run(
        "--strategy", "nncsl", "--tasks", "10", "--limit", "60", "--label-fraction", "0.5",
        "--buffer-size", "100", "--batch-size", "32", "--first-epochs", "10", "--epochs", "6",
        "--warmup-epochs", "1", "--compensators", "none")
    with_buffer.step()
    without = copy.deepcopy(with_buffer)
    without.strategy.settings.buffer_size = 0
    del without.strategy.memory["images"], without.strategy.memory["labels"]
    for one in (with_buffer, without):
        one.step()
        (first,), (old, new) = rows_of(one, "0.5")["head"]["matrix"]
        assert first > 30 and new > 20  # chance is 20, then 10; seen 41 to 60, and 26
        assert old > 25 if one is with_buffer else old == 0


def test_a_run_goes_through_the_functions_of_ldc(monkeypatch):
    """One p_F for all rows that it moves, by Adam from augmented passes, and no old image read."""
    calls = collections.defaultdict(list)
    for owner, name in ((run, "paired_pass"), (run, "fit_projector"), (ldc.PrototypeStore, "move")):
        def watched(*args, function=getattr(owner, name), results=calls[name], **kwargs):
            results.append(function(*args, **kwargs))
            return results[-1]

        monkeypatch.setattr(owner, name, watched)
    one = open_run(*BRIEF, "--ldc-passes", "2", "--compensators", "ldc", "ldc-ridge")
    one.step()
    before = {row.name: row.store.means for row in one.rows}
    one.step()
    clean, *augmented = calls["paired_pass"]
    assert len(augmented) == 2 and not torch.equal(augmented[0][0], augmented[1][0])
    adam, ridge = calls["fit_projector"]
    assert torch.equal(ridge.weight, ldc.fit_projector(*clean, solver="ridge").weight)
    assert len(calls["move"]) == 2  # a store with a scatter moves both at once
    moved = {row.name: row.store.means[:5] for row in one.rows}
    assert torch.equal(moved["ldc"], adam(before["ldc"]))
    assert torch.equal(moved["ldc-ridge"], ridge(before["ldc-ridge"]))
    assert torch.allclose(moved["ldc-ridge+lda"], moved["ldc-ridge"], atol=1e-5)
    assert not any(one.stream.opened.values())


def test_compensators_take_the_options_and_exemplars_they_are_given():
    options = SimpleNamespace(**run.preset_options("lwf", "imagenet100", "paper"))
    exemplars = [torch.rand(50, 6), torch.rand(50, 6)]
    drift = run.Drift(torch.rand(9, 6), torch.rand(9, 6), options, exemplars=exemplars)
    prototypes = torch.rand(2, 6)
    for name, unit in (("sdc", False), ("sdc-unit", True)):
        moved = ldc.sdc_update(prototypes, drift.feats_old, drift.feats_new, sigma=1.0, unit=unit)
        assert torch.equal(run.COMPENSATORS[name](prototypes, drift), moved)
    for m in run.MEMORY:
        moved = torch.stack([feats[:m].mean(0) for feats in exemplars])
        assert torch.equal(run.COMPENSATORS[f"nme-{m}"](prototypes, drift), moved)


def test_metrics_on_a_matrix_worked_by_hand():
    curves = {"accuracy": [90.0, 70.0, 50.0],
              "matrix": [[90.0], [60.0, 80.0], [40.0, 90.0, 60.0]]}
    assert run.summarise(curves) == {"A_last": 50.0, "A_inc": 70.0, "forgetting": 20.0}
    labels = torch.tensor([0, 0, 2, 3])
    assert run.by_task(torch.tensor([0, 1, 2, 2]), labels, [2, 2]) == [50.0, 50.0]
    row = run.PrototypeRow("none", "1", "none")
    row.prototypes = torch.eye(4)
    feats = torch.eye(4)[[0, 2, 2, 3]] + 0.5 * torch.eye(4)[[1, 1, 1, 1]]  # the second: 2, else 1
    observed = SimpleNamespace(test_feats=feats, test_labels=torch.arange(4))
    row.score_first_tasks(observed, [1, 1, 1, 1], SimpleNamespace(metric="cosine"))
    assert row.curves["first_tasks"] == {"2": [100.0], "3": [pytest.approx(200 / 3)]}


def test_label_sets_share_one_backbone():
    """Shares and Table 6's numbers of features: each prototype is the mean of its own images."""
    one = open_run("--strategy", "cassle", *BRIEF, "--limit", "20", "--compensators", "none", "ldc",
                   "oracle")
    one.step()
    stores = run.by_labels(one.rows, lambda row: row.store)
    sizes = {"0.008": 1, "0.05": 1, "0.25": 5, "1": 20, "n5": 5, "n50": 20, "n100": 20, "n500": 20}
    assert list(stores) == list(sizes)
    task = one.stream.task(0)
    feats = run.features(one.model, task.images, task.clean)
    pixels = task.clean(task.images).flatten(1)
    test_images, test_labels = next(iter(one.stream.test(0)))
    for key, rows in stores.items():
        index = run.labelled_images(task, key, seed=0)
        assert (task.labels[index].bincount() == sizes[key]).all()
        own = ldc.class_means(feats[index], task.labels[index], task.classes)
        assert torch.equal(rows["ldc"].means, own)
        if key.startswith("n"):
            assert list(rows) == ["ldc"]
        else:
            assert torch.allclose(rows["oracle"].means, stores["1"]["ldc"].means, atol=1e-5)
            own = ldc.class_means(pixels[index], task.labels[index], task.classes)
            nearest = ldc.ncm(task.clean(test_images).flatten(1), own)
            accuracy = rows_of(one, key)["pixels"]["accuracy"]
            assert accuracy == [run.accuracy(nearest, test_labels)]


# --------------------------------------------------------------------------------------------------
# Files and resuming


def test_result_files(smoke):
    result = json.loads((smoke / "result.json").read_text())
    assert result["finished"] and result["tasks_done"] == 3 and result["changed"] == {"tasks": 3}
    assert result["torch"] == torch.__version__ and result["device"] == "cpu"
    sizes, rows = result["task_sizes"], result["rows"]["1"]
    linear = {"oracle+lda", "ldc-ridge+lda", "ldc-anchor+lda"}
    assert set(rows) == {*run.COMPENSATORS, *linear, "pixels"}
    for name, row in rows.items():
        assert [len(line) for line in row["matrix"]] == [1, 2, 3]
        # the demo has as many test images for every class
        weighted = sum(a * n for a, n in zip(row["matrix"][-1], sizes))
        assert row["A_last"] == row["accuracy"][-1] == pytest.approx(weighted / sum(sizes))
        if name != "pixels":
            assert len(row["oracle_distance"][2]) == 50 and len(row["first_tasks"]["3"]) == 3
    assert max(rows["oracle"]["oracle_distance"][-1]) == pytest.approx(0, abs=1e-6)
    log = [json.loads(line) for line in (smoke / "log.jsonl").read_text().splitlines()]
    assert " --scale smoke " in log[0]["command"] and log[1]["loss"] > 0
    assert log[-1]["accuracy"]["1"]["ldc"] == rows["ldc"]["A_last"]


def test_kept_features_change_no_number(smoke, quick):
    """Nor does it matter which other rows a run has."""
    kept, plain = (metrics(folder)["rows"]["1"] for folder in (smoke, quick))
    assert plain == {name: kept[name] for name in plain}


def test_finished_runs_are_skipped_and_seeds_averaged(quick, capsys):
    before = (quick / "result.json").stat().st_mtime_ns
    assert run.main([*QUICK, "--out-dir", str(quick.parents[3]), "--seed", "0", "1", "1"]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("is finished") == 1  # a seed that is given twice counts once
    assert (quick / "result.json").stat().st_mtime_ns == before
    last = [metrics(quick.parent / f"seed{k}")["rows"]["1"]["ldc"]["A_last"] for k in (0, 1)]
    line = next(line for line in shown.out.splitlines() if line.startswith("| ldc "))
    deviation = abs(last[0] - last[1]) / math.sqrt(2)
    assert f"{sum(last) / 2:.1f} ± {deviation:.1f}" in line


def test_killed_runs_resume_to_the_same_result(quick, tmp_path):
    """SIGKILL in the first task and after its checkpoint; then it ends as an undisturbed run."""
    folder = tmp_path / SEED0
    command = [sys.executable, str(HERE / "ldc.py"), *QUICK, "--out-dir", str(tmp_path)]
    log = folder / "log.jsonl"
    for lines in (3, 7):  # of the log: the command, two epochs; these again and the accuracies
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and (not log.exists() or log.read_text().count("\n") < lines):
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
    (folder / "result.json.0.tmp").touch()  # half a file
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert metrics(folder) == metrics(quick)
    assert not list(folder.glob("*.tmp"))


def test_crash_between_checkpoint_and_result_loses_nothing(quick, tmp_path, monkeypatch):
    """result.json names its checkpoint, so a kill between the two writes leaves the older pair."""
    flags = [*QUICK, "--out-dir", str(tmp_path)]
    folder = tmp_path / SEED0
    write_json = run.write_json

    def killed(path, content):
        if content["tasks_done"] == 2:
            raise KeyboardInterrupt
        write_json(path, content)

    monkeypatch.setattr(run, "write_json", killed)
    assert run.main(flags) == 130
    monkeypatch.undo()
    assert run.main(flags) == 0
    assert metrics(folder) == metrics(quick)
    assert [path.name for path in folder.glob("checkpoint-*.pt")] == ["checkpoint-3.pt"]


def test_a_failure_in_scoring_costs_no_training(quick, tmp_path, monkeypatch):
    flags = [*QUICK, "--out-dir", str(tmp_path)]
    score, loss, steps = run.score, strategies.LwF.loss, []

    def fails(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "score", fails)
    assert run.main(flags) == 130
    monkeypatch.setattr(run, "score", score)
    monkeypatch.setattr(strategies.LwF, "loss", lambda self, x, y: (
        steps.append(self.classes.start), loss(self, x, y))[1])
    assert run.main(flags) == 0
    assert 0 not in steps and steps  # the first task was not trained again
    assert metrics(tmp_path / SEED0) == metrics(quick)
    assert not (tmp_path / SEED0 / "progress.pt").exists()


def test_an_unfinished_task_belongs_to_its_settings(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "score", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.main([*QUICK, "--out-dir", str(tmp_path)])
    sentence = complaint(capsys, *QUICK, "--out-dir", str(tmp_path), "--lr", "0.2")
    assert "holds a run with lr 0.01, but 0.2 was asked for" in sentence


def test_a_row_without_memory_is_left_out_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    def greedy(prototypes, drift):
        if len(prototypes) > 20:
            raise torch.OutOfMemoryError("tried to allocate 9 EiB")
        return prototypes

    monkeypatch.setitem(run.COMPENSATORS, "greedy", greedy)
    flags = [*SMOKE, "--compensators", "none", "greedy", "oracle", "--out-dir", str(tmp_path)]
    write_json = run.write_json

    def killed(path, content):
        write_json(path, content)
        if content["tasks_done"] == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(run, "write_json", killed)
    assert run.main(flags) == 130  # before the row fails
    monkeypatch.setattr(run, "write_json", write_json)
    assert run.main(flags) == 0
    assert "the row greedy is left out from now on" in capsys.readouterr().err
    result = json.loads((tmp_path / SEED0 / "result.json").read_text())
    assert set(result["rows"]["1"]) == {"none", "oracle", "oracle+lda", "pixels"}


def test_sigterm_saves_the_epoch_and_says_so(tmp_path):
    command = [sys.executable, str(HERE / "ldc.py"), *QUICK, "--first-epochs", "400",
               "--out-dir", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    log = tmp_path / SEED0 / "log.jsonl"
    while process.poll() is None and (not log.exists() or log.read_text().count("\n") < 3):
        time.sleep(0.02)
    process.terminate()
    _, error = process.communicate(timeout=30)
    assert process.returncode == 143 and b"continues after its last saved epoch" in error
    done = len(log.read_text().splitlines()) - 1
    kept = torch.load(tmp_path / SEED0 / "progress.pt")
    assert kept["task"] == 0 and kept["phases"][0]["epochs"] == done < 400


def test_a_run_holds_the_images_of_one_task_at_a_time(monkeypatch):
    """Old images, for the oracle, come one task after another beside the current one's."""
    loaded, make_task = [], data.TaskStream._make

    def watched(self, *args, clean_only=False):
        alive = [images for images in loaded if images() is not None]
        assert len(alive) <= clean_only
        task = make_task(self, *args, clean_only=clean_only)
        assert not clean_only or task.images is task.clean_images
        loaded.append(weakref.ref(task.images))
        return task

    monkeypatch.setattr(data.TaskStream, "_make", watched)
    one = open_run(*QUICK)
    for _ in range(3):
        one.step()
    assert len(loaded) == 3 + 1 + 2


def test_order_seed_keeps_the_class_order_while_the_rest_varies():
    runs = [open_run(*QUICK, "--seed", seed, "--order-seed", "7") for seed in "01"]
    assert runs[0].stream.class_order == runs[1].stream.class_order == data.class_order(50, 7)
    weights = [one.strategy.net["backbone"].conv1.weight for one in runs]
    assert not torch.equal(*weights)


def test_unit_features_are_normalised_before_everything(kept, smoke):
    """By replay as by a run; here the first task's prototypes, and a drift whose scale is gone."""
    assert run.main(["--replay", str(kept), "--unit-features"]) == 0
    result = metrics(kept.parent.with_name("lwf-replay") / "seed0")
    assert result["changed"]["unit_features"] is True
    first = observed_in(kept, 1)
    means = ldc.class_means(F.normalize(first.feats), first.labels, first.classes)
    nearest = ldc.ncm(first.test_feats, means)
    rows = result["rows"]["1"]
    assert rows["none"]["accuracy"][0] == run.accuracy(nearest, first.test_labels)
    one = open_run(*SMOKE, "--compensators", *[n for n in rows if n in run.COMPENSATORS],
                   "--unit-features")
    for _ in range(3):
        one.step()
    assert {name: row["accuracy"] for name, row in rows_of(one).items()} == {
        name: row["accuracy"] for name, row in rows.items()}


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


FOUND = {  # what a command may find in its folder: what happened to it, flags, words
    "flipped": (lambda at: flip_a_bit(at / "checkpoint-3.pt"), [], "checkpoint-3.pt is missing or"),
    "missing": (lambda at: (at / "checkpoint-3.pt").unlink(), [], "checkpoint-3.pt is missing or"),
    "no JSON": (lambda at: (at / "result.json").write_text("{"), [], "result.json is damaged"),
    "no object": (lambda at: (at / "result.json").write_text("[1]"), [], "result.json is damaged"),
    "other rate": (lambda at: None, ["--lr", "0.123"],
                   "holds a run with lr 0.01, but 0.123 was asked for"),
    "other precision": (lambda at: None, ["--amp"], "holds a run with amp False, but True"),
    "other rows": (lambda at: None, ["--compensators", "none"], "holds a run with compensators"),
}


@pytest.mark.parametrize("case", list(FOUND))
def test_damage_and_other_settings_are_named_and_nothing_is_overwritten(
        case, quick, tmp_path, capsys):
    happened, flags, words = FOUND[case]
    folder = tmp_path / SEED0
    shutil.copytree(quick, folder)
    result = (folder / "result.json").read_text()
    (folder / "result.json").write_text(result.replace('"finished": true', '"finished": false'))
    happened(folder)
    before = {file: file.read_bytes() for file in folder.iterdir()}
    assert words in complaint(capsys, *QUICK, "--out-dir", str(tmp_path), *flags)
    assert {file: file.read_bytes() for file in folder.iterdir()} == before


def test_two_runs_in_one_folder(tmp_path, capsys):
    folder = tmp_path / SEED0
    folder.mkdir(parents=True)
    with run.held(folder):
        sentence = complaint(capsys, *QUICK, "--out-dir", str(tmp_path))
    assert "Another run is at work" in sentence


def test_own_images_and_own_backbone(tmp_path, capsys):
    """A stranger's JPEGs of several sizes and a torchvision backbone; data are part of a run."""
    rng = np.random.default_rng(0)
    for place in ("mine", "other"):
        for part in ("train/a", "train/b", "train/c", "test/a", "test/b", "test/c"):
            (tmp_path / place / part).mkdir(parents=True)
            for i in range(4):
                pixels = rng.integers(0, 256, (20 + 3 * i, 30, 3), np.uint8)
                Image.fromarray(pixels).save(tmp_path / place / part / f"{i}.jpg")

    def learn(place, *flags):
        return run.main([
            "--dataset", "folder", "--data-dir", str(tmp_path / place), "--image-size", "32",
            "--tasks", "3", "--scale", "smoke", "--backbone", "mobilenet_v3_small", "--device",
            "cpu", "--compensators", "none", "--out-dir", str(tmp_path / "runs"), *flags])

    for wrong in (["--backbone", "resnet1"], ["--weights", "nowhere.pt"], ["--image-size", "3"]):
        assert learn("mine", *wrong) == 2
        assert not (tmp_path / "mine" / ".cache").exists()  # no image has been decoded
    assert learn("mine") == 0, capsys.readouterr().err
    folder = tmp_path / "runs" / "smoke" / "folder" / "lwf" / "seed0"
    image = str(tmp_path / "mine" / "test" / "b" / "0.jpg")
    assert run.main(["--predict", image, "--run", str(folder), "--device", "cpu"]) == 0
    assert re.search(r"0\.jpg: [abc] \(", capsys.readouterr().out)
    assert learn("other") == 2  # equal names and counts: the old table is not shown


# --------------------------------------------------------------------------------------------------
# A finished run: replay, Classifier


@pytest.fixture
def kept(smoke, tmp_path):
    """A copy of the run that kept its features, for its replay beside it."""
    shutil.copytree(smoke, tmp_path / "lwf" / "seed0")
    return tmp_path / "lwf" / "seed0"


def observed_in(folder, task):
    """What a run kept of a task."""
    return run.restore(folder / f"features-0{task}.pt", SimpleNamespace(anchor_width=1024))


def test_replay_repeats_the_rows_of_the_run_that_kept_them(kept, smoke):
    assert run.main(["--replay", str(kept)]) == 0
    rows = metrics(smoke)["rows"]["1"]
    del rows["adc"]  # it needs the networks
    assert metrics(kept.parent.with_name("lwf-replay") / "seed0") == {
        **metrics(smoke), "rows": {"1": rows}}


def test_replay_takes_other_rows_and_options(kept, smoke, capsys, monkeypatch):
    """Your own compensator is scored without training; options reach the rows they concern."""
    monkeypatch.setitem(run.COMPENSATORS, "mine", lambda p, drift: p)
    rows = {name: set(run.default_rows(name, "cifar100")) for name in ("pass", "lwf")}
    assert {"mine", "ldc"} < rows["pass"] and "adc" not in rows["pass"] and "adc" in rows["lwf"]

    def replayed(tag, *flags):
        assert run.main(["--replay", str(kept), "--tag", tag, *flags]) == 0
        assert "| mine " in capsys.readouterr().out
        result = metrics(kept.parent.with_name(f"lwf-{tag}") / "seed0")
        return result["rows"]["1"], result["changed"]

    rows, changed = replayed("a", "--compensators", "mine", "none", "ldc-ridge", "--ridge", "1e9")
    assert changed == {"tasks": 3, "ridge": 1e9}
    assert rows["none"] == {**metrics(smoke)["rows"]["1"]["none"], "oracle_distance": []}
    # an infinite pull towards the identity moves nothing
    assert rows["mine"]["accuracy"] == rows["ldc-ridge"]["accuracy"] == rows["none"]["accuracy"]
    rows, _ = replayed("b", "--compensators", "mine", "--metric", "euclidean")
    first = observed_in(kept, 1)
    means = ldc.class_means(first.feats, first.labels, first.classes)
    nearest = (first.test_feats[:, None] - means).norm(dim=2).argmin(1)
    assert rows["mine"]["accuracy"][0] == run.accuracy(nearest, first.test_labels)
    assert "holds a replay already" in complaint(capsys, "--replay", str(kept), "--tag", "a")


def test_a_narrow_anchor_has_the_first_numbers_of_phi(kept):
    flags = ["--compensators", "ldc-anchor", "--anchor-width", "7", "--tag", "narrow"]
    assert run.main(["--replay", str(kept), *flags]) == 0
    first, second = observed_in(kept, 1), observed_in(kept, 2)
    anchored = torch.cat([first.phi[:, :7], first.feats], 1)
    old = ldc.class_means(anchored, first.labels, first.classes)
    new = ldc.class_means(second.feats, second.labels, second.classes)
    wide = torch.cat([second.phi[:, :7], second.drift.feats_old], 1)
    means = torch.cat([ldc.solve_projector([(wide, second.feats)], 1e-4)(old), new])
    row = metrics(kept.parent.with_name("lwf-narrow") / "seed0")["rows"]["1"]["ldc-anchor"]
    nearest = ldc.ncm(second.test_feats, means)
    assert row["accuracy"][1] == run.accuracy(nearest, second.test_labels)


def edited(edit):
    """Change what was kept of every task but the first."""
    def change(folder):
        for path in sorted(folder.glob("features-*.pt"))[1:]:
            content = torch.load(path)
            edit(content)
            torch.save(content, path)

    return change


@pytest.mark.parametrize("happened, flags, words", [
    (lambda folder: None, ["--compensators", "adc"], "the row adc needs networks"),
    (edited(lambda kept: kept["drift"]["oracle"].clear()), ["--compensators", "oracle"],
     "the row oracle needs old images"),
    (edited(lambda kept: kept["drift"]["exemplars"].clear()), ["--compensators", "nme-5"],
     "the row nme-5 needs exemplars"),
    (edited(lambda kept: kept.update(phi=kept["phi"][:, :7])), [], "kept 7 numbers of phi(x)"),
    (lambda folder: None, ["--ldc-passes", "9"], "has kept 1 augmented passes"),
    (lambda folder: None, ["--ldc-lr", "1e30"], "the row ldc: prototypes were moved to values"),
    (lambda folder: (folder / "features-02.pt").write_text(""), [], "features-02.pt is missing"),
    (lambda folder: (folder / "features-01.pt").unlink(), [], "features of some tasks only"),
    (lambda folder: (folder / "result.json").unlink(), [], "holds no kept run"),
])
def test_replay_says_what_it_cannot_do(happened, flags, words, kept, tmp_path, capsys):
    happened(kept)
    assert words in complaint(capsys, "--replay", str(kept), *flags)
    assert [path.name for path in tmp_path.iterdir()] == ["lwf"]


def test_classifier_takes_one_path_none_or_many(smoke, tmp_path):
    dataset = data.load("demo")
    images = torch.cat([dataset.train_images(c)[:1] for c in (3, 17)])
    paths = [tmp_path / "3.png", tmp_path / "17.png"]
    for path, image in zip(paths, images):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    classifier = run.Classifier(smoke)
    stores = torch.load(smoke / "checkpoint-3.pt")["stores"]["1"]
    feats = classifier.model(dataset.clean(images))
    prototypes = stores["ldc-anchor"]["means"][:, -feats.shape[1]:]  # the best row that it has
    cosine = F.cosine_similarity(feats[:, None], prototypes, dim=2)
    names = [dataset.class_names[metrics(smoke)["class_order"][c]] for c in cosine.argmax(1)]
    assert [name for name, _ in classifier(paths * 40)] == names * 40
    assert [value for _, value in classifier(paths)] == pytest.approx(cosine.amax(1).tolist())
    assert classifier(paths[0]) == classifier([str(paths[0])]) and classifier([]) == []
    assert torch.equal(run.Classifier(smoke, row="sdc").prototypes, stores["sdc"]["means"])
    with pytest.raises(data.UserError, match="has no row cubic; it has none"):
        run.Classifier(smoke, row="cubic")


# --------------------------------------------------------------------------------------------------
# The command line: presets, mistakes


def test_flag_over_scale_over_data_set_over_strategy_over_default(monkeypatch):
    class Mine(strategies.LwF):
        defaults = {**strategies.LwF.defaults, "first_lr": 1, "lr": 1, "weight_decay": 1,
                    "lambda_kd": 1}
        by_dataset = {"demo": dict(lr=2, weight_decay=2, lambda_kd=2)}
        by_scale = {"small": dict(weight_decay=3, lambda_kd=3)}
        ldc_options = dict(ldc_lr=1, ridge=1, lda_shrink=1, sdc_sigma=1)

    monkeypatch.setitem(strategies.STRATEGIES, "mine", Mine)
    monkeypatch.setitem(run.OPTIONS_BY_DATASET, "demo", dict(ridge=2, lda_shrink=2, sdc_sigma=2))
    monkeypatch.setitem(run.OPTIONS_BY_SCALE, "small", dict(lda_shrink=3, sdc_sigma=3))
    args = resolved(*"--strategy mine --scale small --lambda-kd=4 --sdc-sigma 4".split())
    assert args.changed == {"lambda_kd": 4, "sdc_sigma": 4}
    for values, expected in (
            (args.settings, dict(first_lr=1, lr=2, weight_decay=3, lambda_kd=4)),
            (args.settings, dict(width=16, first_epochs=50, epochs=15, milestones=(7, 14))),
            (args.options, dict(adc_alpha=25, ldc_lr=1, ridge=2, lda_shrink=3, sdc_sigma=4))):
        assert {name: values[name] for name in expected} == expected


def test_flags_equal_to_their_presets_are_in_range_and_change_nothing():
    """However they are written; and of what differs the value is recorded."""
    parser = run.build_parser()
    for strategy in strategies.STRATEGIES:
        for dataset in data.DATASETS:
            for scale in run.SCALES:
                which = strategy, dataset, scale
                presets = {**dict(zip(("strategy", "dataset", "scale"), which)),
                           **run.preset_settings(*which), **run.preset_options(*which)}
                flags = []
                for name, value in presets.items():
                    values = value if isinstance(value, tuple) else (value,)
                    if values and value is not False:
                        flags += ["--" + name.replace("_", "-"), *map(str, values)]
                args = parser.parse_args(flags)
                run.resolve(args)
                assert args.changed == {}, which
    assert resolved("--lr=0.02").changed == resolved("--lr", "2e-2").changed == {"lr": 0.02}


NOWHERE = "no/such/folder"
BAD_FLAGS = {
    "--device cuda": "--device cuda is not available",
    f"--dataset folder --data-dir {NOWHERE}": NOWHERE,
    "--tasks 77": "50 classes cannot be split into 77 tasks",
    "--strategy finetune --lambda-kd 3": "no setting --lambda-kd",
    "--backbone resnet1": "not a torchvision classification model",
    "--predict cat.png": "--predict needs --run",
    f"--predict cat.png --run {NOWHERE}": "holds no trained run",
    f"--replay {NOWHERE}": "holds no kept run",
    "--datset demo": "unrecognized arguments: --datset",
    "--epochs many": "invalid int value: 'many'",
    "--tag a/b": "--tag a/b",
    "--first-classes 50": "--first-classes 50",
    "--image-size 32": "--image-size 32",
    "--strategy pass --label-fraction 0": "--label-fraction 0.0: expected more than 0, at most 1",
    "--strategy nncsl --buffer-size -1": "--buffer-size -1",
    "--strategy cassle --prototype-labels 0.5 2": "--prototype-labels 2",
    "--seed -1": "--seed -1: expected 0 to 4294967295",
    "--ldc-passes -1": "--ldc-passes -1: expected at least 0",
}
for names, values in (
        ("stem projector metric strategy compensators dataset scale device views", ["cubic"]),
        ("tasks first-classes limit image-size width epochs adc-steps adc-images", ["0", "-3"]),
        ("lr first-lr ldc-lr sdc-sigma adc-alpha", ["0", "inf", "nan"]),
        ("weight-decay lambda-kd ridge lda-shrink", ["-1", "inf", "nan"])):
    BAD_FLAGS |= {f"--{name} {value}": f"--{name}" for name in names.split() for value in values}


@pytest.mark.parametrize("flags", list(BAD_FLAGS))
def test_wrong_input_gets_one_sentence(flags, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert BAD_FLAGS[flags] in complaint(capsys, "--scale", "smoke", *flags.split())
    assert not list(tmp_path.iterdir())  # no folder was made


WRONG = {  # what goes wrong in a run: flags, what is replaced, words
    "loss": (["--first-lr", "1e30"], None, "in task 1, epoch "),
    "features": ([], (run, "features", lambda *_: torch.tensor([[math.nan]])),
                 "features after task 1 are not finite"),
    "too few": (["--compensators", "none", "mine"],
                (run.COMPENSATORS, "mine", lambda p, drift: p[:-1]), "the row mine: 5 prototypes"),
    "disk": ([], (os, "fsync", lambda handle: os.read(-1, 1)), "Bad file descriptor"),
    "file": (["--out-dir", "file/out"], None, "file"),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_what_goes_wrong_in_a_run_is_one_sentence(case, tmp_path, capsys, monkeypatch):
    flags, replaced, words = WRONG[case]
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    if replaced:
        replace = monkeypatch.setitem if isinstance(replaced[0], dict) else monkeypatch.setattr
        replace(*replaced)
    assert words in complaint(capsys, *BRIEF, "--compensators", "none", *flags)
    assert not list(tmp_path.rglob("*.tmp"))
    assert len(list(tmp_path.rglob("result.json"))) == (case == "too few")  # of its first task


def test_the_first_step_that_is_not_finite_is_named():
    losses = torch.tensor([1.0, math.inf, math.nan])
    with pytest.raises(data.UserError, match="became inf in task 2, epoch 3, step 2"):
        strategies.finite_mean(list(losses), task=1, epoch=2)


def test_without_git_the_commit_is_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert run.commit() is None


@pytest.mark.parametrize("flag", ["--help", "--show-settings"])
def test_a_pipe_that_closes_early_is_no_error(flag):
    """python ldc.py --help | head"""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, str(HERE / "ldc.py"), flag], stdout=writer,
                          stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_flag_has_a_help_text_and_is_used():
    parser = run.build_parser()
    assert parser.format_help().count("\n") < 120
    source = "".join((HERE / name).read_text() for name in ("run.py", "strategies.py"))
    used = set(re.findall(r'\b(?:args|settings|s|options|o)(?:\.|, ")([a-z_]+)', source))
    for name in re.findall(r'self\.setting\("([a-z_]+)"', source):  # or first_<name>
        used |= {name, "first_" + name}
    for action in parser._actions:
        assert action.help and action.dest in used | {"help"}, action.dest


# --------------------------------------------------------------------------------------------------
# README

README = (HERE / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_readme_is_short_and_begins_with_a_picture():
    lines = README.splitlines()
    assert len(lines) <= 200 and any(line.startswith("![") for line in lines[:15])
    in_sight = re.sub(r"<details>.*?</details>", "", README, flags=re.S)
    assert len(in_sight.split()) <= 1300


def test_readme_commands_parse(monkeypatch):
    monkeypatch.chdir(HERE)
    lines = [line.split("#")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    commands = [shlex.split(line.split("|")[0].split("&&")[-1]) for line in lines if line]
    flags = [words[2:] for words in commands if words[1:2] == ["ldc.py"]]
    assert len(flags) >= 5
    for words in flags:
        if "--predict" not in words:
            resolved(*words)
    assert any("--show-settings" in words for words in flags)
    for words in commands:
        assert (HERE / words[1]).exists() or words[1].startswith("-"), words


def test_readme_names_exist():
    tests = Path(__file__).read_text(encoding="utf-8")
    for name in re.findall(r"`(test_[a-z_]*[a-z])`", README):
        assert f"def {name}(" in tests, name
    modules = {"ldc": ldc, "beyond": beyond, "run": run, "strategies": strategies, "data": data,
               "report": report}
    for module, name in re.findall(rf"`({'|'.join(modules)})\.(?!py\b)(\w+)", README):
        assert hasattr(modules[module], name), name
    for name in re.findall(r"`--([a-z-]+)[ `:]", README):
        assert f"--{name.removeprefix('no-')}" in run.build_parser().format_help(), name


def test_readme_python_examples_run(smoke, tmp_path, monkeypatch, capsys):
    """One after another, as a reader would type them, with a run and an image; main returns 0."""
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (40, 30), "red").save("photo.png")
    shutil.copytree(smoke, "runs/demo/folder/lwf/seed0")
    for owner, name in ((run, "COMPENSATORS"), (strategies, "STRATEGIES"),
                        (strategies, "SETTINGS")):
        monkeypatch.setattr(owner, name, dict(getattr(owner, name)))
    codes, main = [], run.main
    monkeypatch.setattr(run, "main", lambda argv: codes.append(main(argv)))
    quoted = re.findall(r"`(run\.Classifier\(.*?\))`", README)
    names = {}
    for block in (*blocks("python"), *quoted):
        exec(block, names)
    assert codes == [0, 0] and len(quoted) == 1
    assert capsys.readouterr().out.count("| mean-shift ") == 2
    anchor = re.search(r"from beyond import.*?```", README, re.S).group()
    assert anchor.count("\n") <= 8


# --------------------------------------------------------------------------------------------------
# run_all.sh


def run_all(*words, **env):
    env = {**os.environ, "PYTHON": "python", **env}
    command = ["bash", str(HERE / "run_all.sh"), *words]
    return subprocess.run(command, text=True, capture_output=True, env=env)


def listed(*words, **env):
    """The commands that run_all.sh would run, each as ldc.py without a GPU understands it."""
    done = run_all("--list", *words, **env)
    assert done.returncode == 0, done.stderr
    commands = [shlex.split(line) for line in done.stdout.splitlines()]
    return [resolved(*words[words.index("ldc.py") + 1:], "--device", "cpu") for words in commands]


@pytest.mark.parametrize("scale", ["paper", "small", "smoke"])
def test_listed_commands_parse_never_collide_and_fill_every_cell(scale):
    runs = listed(scale, "copied")
    folders = [(a.scale, a.dataset, a.strategy, a.tag, *a.seed) for a in runs]
    assert len(set(folders)) == len(folders) and {a.scale for a in runs} == {scale}
    assert all(a.generated == (scale == "smoke" or None) for a in runs)
    for _, _, cells, _ in report.TABLES.values():
        for _, _, words, _ in cells:
            place = words["dataset"], words["strategy"]
            found = [a for a in runs if (a.dataset, a.strategy) == place]
            if words["strategy"] in ("pass", "nncsl"):
                found = [a for a in found if f"{a.settings['label_fraction']:g}" == words["labels"]]
            if words["buffer"]:
                found = [a for a in found if str(a.settings["buffer_size"]) == words["buffer"]]
            rows = [*found[0].compensators, "head"] if found else []
            assert words["row"] in rows, words
    for name, rows in (("lwf", {f"nme-{m}" for m in run.MEMORY}), ("cassle", {"ldc"}),
                       ("joint", set()), ("joint-ssl", set())):
        found = [a for a in runs if a.strategy == name]  # the figures
        assert found and all(rows | {"oracle"} <= set(a.compensators) for a in found)


def test_run_all_runs_what_is_asked_for():
    for words, count in (("table1", 60), ("smoke table1", 15), ("fig-nme", 15)):
        assert len(listed(*words.split())) == count
    assert len(listed("table1", "fig-nme", "fig-kde")) == 60  # shared backbones once
    leaks = [a for a in listed("table3", SEEDS="7") if a.settings.get("bn_leak")]
    assert [(a.strategy, *a.seed) for a in leaks] == [("pfr", 7), ("cassle", 7)]
    first, *_ = listed("table2", WEIGHTS="my w.npz", OUT="a b", DATA="it's", LDC_FLAGS="--ridge 7")
    assert (first.settings["weights"], first.options["ridge"]) == ("my w.npz", 7)
    assert (first.out_dir, first.data_dir) == ("a b", "it's")
    done = run_all("tabel1")
    assert done.returncode == 2 and "tabel1 is unknown" in done.stderr


@pytest.fixture
def fake_python(tmp_path):
    """An interpreter that notes what it is asked to do; FeCAM fails, EFC's runs are long."""
    python, asked = tmp_path / "python", tmp_path / "asked"
    python.write_text(f"""#!/bin/sh
        (printf "%s|" "$@"; echo) >> "{asked}"
        case "$*" in *fecam*) exit 3;; *ldc.py*efc*) exec sleep 60;; esac
    """)
    python.chmod(0o755)
    asked.touch()
    return str(python), lambda: [line.split("|")[:-1] for line in asked.read_text().splitlines()]


def test_run_all_goes_on_after_a_failure_and_names_it(tmp_path, fake_python):
    python, asked = fake_python
    out = str(tmp_path / "my runs")
    done = run_all("paper", "table1", PYTHON=python, OUT=out, SEEDS="0")
    assert done.returncode == 1 and done.stderr.count("exit code 3: ") == 3
    *runs, last = asked()
    assert last == ["report.py", out, "--scale", "paper", "--only", "table1"]
    assert len(runs) == 12 and all(words[words.index("--out-dir") + 1] == out for words in runs)
    assert run_all("fig-toy", PYTHON=python).returncode == 0 and len(asked()) == 14  # no run


def test_ctrl_c_stops_run_all(tmp_path, fake_python):
    """Also where a run ends as ldc.py does, with exit code 130."""
    python, asked = fake_python
    env = {**os.environ, "PYTHON": python, "OUT": str(tmp_path), "SEEDS": "0"}
    # tests started in the background inherit an ignored SIGINT
    script = subprocess.Popen(["bash", str(HERE / "run_all.sh"), "copied", "table1"],
                              stderr=subprocess.DEVNULL, env=env, start_new_session=True,
                              preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    end = time.monotonic() + 30
    while not (asked() and "efc" in asked()[-1]):
        assert time.monotonic() < end
        time.sleep(0.05)
    before = asked()
    os.killpg(script.pid, signal.SIGINT)
    assert script.wait(20) in (130, -signal.SIGINT) and asked() == before
    Path(python).write_text("#!/bin/sh\nexit 130\n")
    assert run_all("table1", PYTHON=python).returncode == 130


def test_generated_images_stand_in_and_are_never_taken_for_real_ones(tmp_path, capsys):
    flags = ["--scale", "smoke", "--tasks", "2", "--limit", "4", "--compensators", "none", "ldc",
             "--device", "cpu", "--out-dir", str(tmp_path), "--dataset", "imagenet100"]
    assert run.main([*flags, "--generated"]) == 0
    assert "generated images, limit 4, tasks 2: accuracy" in capsys.readouterr().out
    assert run.main([*flags, "--data-dir", str(tmp_path)]) == 2
    Image.new("RGB", (40, 30), "red").save(tmp_path / "photo.png")
    assert run.main(["--predict", str(tmp_path / "photo.png"), "--device", "cpu", "--run",
                     str(tmp_path / "smoke" / "imagenet100" / "lwf" / "seed0")]) == 0


# --------------------------------------------------------------------------------------------------
# Tables and figures


def fake_run(root, name="lwf", seed=0, rows=None, dataset="cifar100", labels="1", scale="paper",
             tasks=10, **more):
    """A result.json in which each row but the oracle falls by a point per task to its A_last."""
    lines = {}
    for row, last in rows.items():
        lines[row] = {
            "A_last": last, "A_inc": last + 10, "forgetting": last / 2,
            "accuracy": [last + (row != "oracle") * (tasks - t) for t in range(1, tasks + 1)],
            "first_tasks": {k: [last + s * t for t in range(tasks)] for k, s in zip("23", (1, -1))},
            "oracle_distance": [[(last + c) / 1000 for c in range(2 * t)] + [0.9] * 2
                                for t in range(tasks)]}
    result = {
        "dataset": dataset, "strategy": name, "scale": scale, "seed": seed,
        "tasks": tasks, "tasks_done": tasks, "task_sizes": [2] * tasks, "finished": True,
        "settings": {"width": 16, "epochs": 8}, "changed": {}, "rows": {labels: lines},
        "seconds": {"step": 3600.0}, **more}
    path = root / scale / dataset / name / f"seed{seed}" / "result.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result))
    return result


@pytest.fixture
def fakes(tmp_path):
    for seed, last in enumerate((30.0, 34.0)):
        rows = {"none": 20.0, "sdc": 0.0, "ldc": last, "ldc-ridge": 36.0, "ldc-anchor": 40.0,
                "nme-5": 42.0, "nme-20": 44.0, "oracle": 60.0, "oracle+lda": 61.0}
        fake_run(tmp_path, seed=seed, rows={**rows, "mine": 50.0} if seed else rows, tasks=4)
    fake_run(tmp_path, seed=3, rows={"none": 99.0}, finished=False, tasks_done=3)
    fake_run(tmp_path, "joint", rows={"none": 65.0, "oracle": 70.0}, tasks=4)
    fake_run(tmp_path, "cassle", rows={"ldc": 31.0}, labels="0.25", tasks=4)
    fake_run(tmp_path, "ssl", rows={"oracle": 71.0}, strategy="joint-ssl", tasks=4)
    fake_run(tmp_path, rows={"nme-5": 43.0}, dataset="tinyimagenet")
    fake_run(tmp_path, rows={"nme-5": 9.0}, dataset="imagenet100", changed={"tasks": 5})
    fake_run(tmp_path, "nncsl", rows={"head": 30.0}, labels="0.05", settings={"buffer_size": 500})
    for seed, text in enumerate(('{"dataset": "cifar', "[1, 2]", '{"rows": [1]}')):
        fake_run(tmp_path, "efc", seed, rows={})
        (tmp_path / f"paper/cifar100/efc/seed{seed}/result.json").write_text(text)
    rows = {"none": 40.0, "mine": 43.0, "oracle": 40.4}
    fake_run(tmp_path, "newcomer", rows=rows, dataset="my_birds")
    return tmp_path


SPREAD = 2.8284  # of 30 and 34
LWF = "cifar100 lwf, paper scale"
BIRDS = "my_birds newcomer, paper scale"


def table_of(text, caption):
    """{first cell: further cells} of the table below a caption, header included."""
    header, _, *lines = text[text.index(caption):].split("\n\n")[1].splitlines()
    cells = {}
    for line in (header, *lines):
        name, *rest = (part.strip() for part in line.strip("|").split("|"))
        cells[name] = rest
    return cells


def report_of(folder, *only):
    """The report with these tables and figures; without any, all tables and no figure."""
    assert report.main([str(folder), "--only", *(only or report.TABLES)]) == 0
    return (folder / "README.md").read_text(encoding="utf-8")


def test_the_papers_tables_say_ours_the_papers_and_what_is_missing(fakes, capsys):
    text = report_of(fakes)
    one = table_of(text, "Table 1")
    assert one["LwF+LDC, paper"][:2] == ["45.4 ± 2.8", "59.5 ± 3.9"]
    assert one["LwF+LDC, ours, paper scale"][:2] == ["32.0 ± 2.8 (2)", "42.0 ± 2.8 (2)"]
    assert "imagenet100 A_inc, PASS, FeTrIL, FeCAM, EFC.\n\nLwF+NCM is our row none." in text
    three = table_of(text, "Table 3")
    assert three["NNCSL (500), ours, paper scale"] == ["30.0 (1)", "", ""]
    assert three["CaSSLe+LDC, ours, paper scale"] == ["", "31.0 (1)", ""]
    assert text.count(".** Not run.") == 2
    assert "in its tables: imagenet100 lwf, paper scale, tasks 5.\n" in text
    assert capsys.readouterr().err.count("/result.json is no result of ldc.py") == 3
    assert "99.0" not in text  # of the unfinished run


def test_all_rows_the_share_of_the_gap_and_what_was_run(fakes):
    text = report_of(fakes, "table2")
    rows = table_of(text, "All rows, A_last")
    assert list(rows)[:4] == [
        "", f"{LWF} (2)", "cifar100 cassle, paper scale, 25 % of the labels (1)",
        "cifar100 nncsl, paper scale, 5 % of the labels, buffer 500 (1)"]
    assert rows[""] == ["head", *"none sdc ldc ldc-ridge ldc-anchor nme-5 nme-20 oracle".split(),
                        "oracle+lda", "mine"]
    assert rows[f"{LWF} (2)"][2:4] == ["0.0 ± 0.0", "32.0 ± 2.8"]
    assert rows[f"{LWF} (2)"][-1] == "50.0 (1)"
    assert table_of(text, "All rows, A_inc")[f"{BIRDS} (1)"][1] == "50.0"
    assert table_of(text, "Share of the gap") == {
        "": ["sdc", "ldc", "ldc-ridge", "ldc-anchor", "mine"],
        f"{LWF} (2)": ["-50 ± 0", "30 ± 7", "40 ± 0", "50 ± 0", "75"],
        f"{BIRDS} (1)": ["", "", "", "", "no gap"]}
    ran = table_of(text, "What was run")
    assert ran["cifar100/lwf, paper scale"] == ["0 1", "?", "60"]
    assert ran["cifar100/lwf, paper scale, 3 of 10 tasks"][0] == "3"


def test_two_folders_are_read_and_the_first_is_written(fakes, tmp_path_factory, capsys):
    first = tmp_path_factory.mktemp("first")
    fake_run(first, "pfr", rows={"ldc": 33.0}, labels="0.25")
    before = sorted(fakes.rglob("*"))
    assert report.main([str(first), str(fakes), "--latex"]) == 0
    tables = dict(re.findall(r"% (.*)\n(\\begin.*\n(?:.*\n)*?\\end.*)", capsys.readouterr().out))
    four = tables["cifar100, 4 tasks"]
    assert LWF + r" & ldc & 32.0 $\pm$ 2.8 & 42.0 $\pm$ 2.8 & 16.0 $\pm$ 1.4 \\" in four
    assert [four.count("\\" + rule) for rule in ("toprule", "midrule", "bottomrule")] == [1, 4, 1]
    assert "& mine &" in four and "nme" not in four and r"25 \% of" in four
    assert "& ldc & 33.0 & 43.0 & 16.5" in tables["cifar100, 10 tasks"]
    assert "99.0" not in str(tables) and r"my\_birds" in tables["my_birds, 10 tasks"]
    assert not list(first.glob("*.md"))
    assert report.main([str(first), str(fakes), "--only", "table3", "fig-nme"]) == 0
    three = table_of((first / "README.md").read_text(encoding="utf-8"), "Table 3")
    assert {"PFR+LDC, ours, paper scale", "CaSSLe+LDC, ours, paper scale"} <= three.keys()
    assert points_of(first, "fig-nme") and sorted(fakes.rglob("*")) == before


PROTOCOLS = [  # what a run changes, what else it is, its label, whether it is the paper's protocol
    ({"label_fraction": 0.05, "buffer_size": 0}, {}, "paper scale", True),
    ({}, {"dataset": "demo"}, "paper scale", False),
    ({"bn_leak": True}, {}, "paper scale, bn leak", True),
    ({"retrospection": "linear", "epochs": 5}, {},
     "paper scale, width 16, 20 + 5 epochs, retrospection linear", True),
    ({"weights": "w.npz"}, {"dataset": "cars"}, "paper scale, weights w.npz", True),
    ({"weights": "none"}, {"dataset": "cars"}, "paper scale, weights none", False),
    ({"weights": "w.npz"}, {}, "paper scale, weights w.npz", False),
    ({"lr": 0.1}, {}, "paper scale, lr 0.1", False),
    ({"classes": 20}, {"dataset": "tinyimagenet"}, "paper scale, classes 20", False),
    ({"epochs": 5}, {}, "paper scale, width 16, 20 + 5 epochs", False),
    ({"epochs": 40, "milestones": [30], "lr": 0.01}, {"scale": "small"},
     "small scale, width 16, 20 + 40 epochs, lr 0.01", True),
    ({"weights": "none", "limit": 5, "generated": True}, {"scale": "smoke"},
     "smoke scale, width 16, 20 + 8 epochs, generated images, limit 5, weights none", True),
]


def test_a_run_says_what_it_changes_and_whether_it_follows_the_paper(tmp_path):
    for changed, more, label, fits in PROTOCOLS:
        settings = {"width": 16, "first_epochs": 20, "epochs": 8, **changed}
        result = fake_run(tmp_path, rows={}, changed=changed, settings=settings, **more)
        assert (report.describe(result), report.follows_paper(result)) == (label, fits)


def test_the_table_of_a_run_has_the_papers_values_for_its_protocol_alone(tmp_path):
    ours = [fake_run(tmp_path, rows={"none": 40.0, "ldc": 45.0 + seed}, seed=seed, tasks=3)
            for seed in (0, 2)]
    text = report.run_table([ours[0], *ours])  # a seed counts once
    assert "seeds: 2\n" in text
    assert table_of(text, "cifar100 lwf") == {
        "": ["t1", "t2", "t3", "A_last", "A_inc", "forgetting", "paper's A_last"],
        "none": ["42.0", "41.0", "40.0", "40.0 ± 0.0", "50.0 ± 0.0", "20.0 ± 0.0", "40.5±2.7"],
        "ldc": ["48.0", "47.0", "46.0", "46.0 ± 1.4", "56.0 ± 1.4", "23.0 ± 0.7", "45.4±2.8"]}
    assert "3 of 10 tasks" in report.run_table([{**ours[0], "tasks": 10, "finished": False}])
    for other in ({"changed": {"tasks": 2}}, {"finished": False}, {"scale": "smoke"}):
        assert "paper's A_last" not in report.run_table([{**ours[0], **other}])


def points_of(folder, name):
    """{panel: {series: [(x, y, deviation, seeds)]}} of a figure's CSV file."""
    panels = {}
    with open(folder / "paper" / "figures" / f"{name}.csv", newline="") as file:
        for panel, series, *numbers in list(csv.reader(file))[1:]:
            curve = panels.setdefault(panel, {}).setdefault(series, [])
            curve.append(tuple(map(float, numbers)))
    return panels


def test_points_of_the_papers_figures(fakes):
    report_of(fakes, "fig-drift", "fig-nme", "fig-kde")
    drift = {" ".join(panel.split()[:3]): curves  # without the run's description
             for panel, curves in points_of(fakes, "fig-drift").items()}
    assert drift["LwF: tasks 1-2"]["oracle"] == [(2, 61, 0, 2), (3, 62, 0, 2), (4, 63, 0, 2)]
    assert drift["LwF: tasks 1-3"] == {
        "no compensation": [(3, 18, 0, 2), (4, 17, 0, 2)],
        "LDC": [(3, 30, SPREAD, 2), (4, 29, SPREAD, 2)],
        "oracle": [(3, 58, 0, 2), (4, 57, 0, 2)],
        "joint training": [(3, 68, 0, 1), (4, 67, 0, 1)]}
    assert drift["CaSSLe: tasks 1-3"]["joint training"] == [(3, 69, 0, 1), (4, 68, 0, 1)]
    assert points_of(fakes, "fig-nme") == {
        "cifar100": {"LDC": [(5, 32, SPREAD, 2), (20, 32, SPREAD, 2)],
                     "oracle": [(5, 60, 0, 2), (20, 60, 0, 2)],
                     "NME": [(5, 42, 0, 2), (20, 44, 0, 2)]},
        "tinyimagenet": {"NME": [(5, 43, 0, 1)]}}
    kde = points_of(fakes, "fig-kde")
    assert list(kde) == ["after task 2", "after task 4"]
    top = 1.1 * 0.039  # of class 5; new classes, at a distance of 0.9, are left out
    for row, pool in (("SDC", [0, 0.001] * 2), ("LDC", [0.03, 0.031, 0.034, 0.035])):
        width = max(1.06 * statistics.pstdev(pool) * 4 ** -0.2, top / 200)
        bells = [statistics.NormalDist(mean, width) for d in pool for mean in (d, -d)]
        for k, (x, y, *_) in enumerate(kde["after task 2"][row]):
            density = sum(bell.pdf(top * k / 200) for bell in bells) / 4
            assert (x, y) == pytest.approx((top * k / 200, density), abs=1e-3)
        assert k == 200


def test_points_of_our_figures(fakes):
    for name, changed in {"narrow": {"anchor_width": 256}, "wide": {"width": 64}, "unit": {
            "anchor_width": 256, "unit_features": True}}.items():
        rows = {"none": 20.0, "ldc-anchor": 30.0, "oracle": 60.0}
        fake_run(fakes, name, rows=rows, tasks=4, strategy="lwf", changed=changed)
    few = {"strategy": "lwf", "labels": "0.25", "changed": {"label_fraction": 0.25}}
    fake_run(fakes, "few", rows={"none": 9.0}, tasks=4, **few)
    report_of(fakes, "fig-curves", "fig-beyond")
    curves = points_of(fakes, "fig-curves")
    lwf = curves[LWF.replace(",", ";")]
    assert list(lwf) == ["none", "sdc", "ldc", "ldc-ridge", "ldc-anchor", "oracle", "mine"]
    assert lwf["ldc"] == [(t, 36 - t, SPREAD, 2) for t in (1, 2, 3, 4)]
    assert lwf["mine"] == [(t, 54 - t, 0, 1) for t in (1, 2, 3, 4)]
    assert list(curves[f"{LWF}, 25 % of the labels".replace(",", ";")]) == ["none"]
    assert curves[BIRDS.replace(",", ";")]["mine"][0] == (1, 52, 0, 1)
    beyond = points_of(fakes, "fig-beyond")
    # a prototype of width 16 has 128 numbers, an image 3072; none is at 20, the oracle at 60; the
    # wider network has fewer seeds, and unit features are another experiment
    assert beyond["what is kept paper scale"] == {
        "none": [(128, 0, 0, 2)], "sdc": [(128, -50, 0, 2)], "ldc": [(128, 30, 7.0711, 2)],
        "ldc-ridge": [(128, 40, 0, 2)], "ldc-anchor": [(384, 25, 0, 1), (1152, 50, 0, 2)],
        "NME": [(15360, 55, 0, 2), (61440, 60, 0, 2)]}
    assert "nme-5" not in beyond["task by task"]
    assert beyond["task by task"]["ldc-anchor"] == [(t, 20, 0, 2) for t in (1, 2, 3, 4)]
    # the others fall by a point per task, the oracle does not
    assert beyond["task by task"]["oracle"] == [(t, 36 + t, 0, 2) for t in (1, 2, 3, 4)]
    assert beyond["by age"] == {  # the last task's distances, mean of two classes
        "ldc-ridge": [(1, 0.0405, 0, 2), (2, 0.0385, 0, 2), (3, 0.0365, 0, 2)],
        "ldc-anchor": [(1, 0.0445, 0, 2), (2, 0.0425, 0, 2), (3, 0.0405, 0, 2)]}


def test_the_toy_needs_no_run_and_ldc_finds_rotation_and_scaling_too(tmp_path):
    def off(panel, name):
        return math.dist(toy[panel][name][0][:2], toy[panel]["true mean"][0][:2])

    assert report.main([str(tmp_path), "--scale", "paper", "--only", "fig-toy"]) == 0
    toy = points_of(tmp_path, "fig-toy")
    assert off("after a translation", "moved by SDC") < 0.01
    assert off("after a translation", "moved by LDC") < 0.05
    assert off("after rotation and scaling", "moved by LDC") < 0.05
    assert off("after rotation and scaling", "moved by SDC") > 2


def test_a_figure_shows_its_points_and_is_drawn_again_only_when_they_change(fakes):
    points = list(report.nme_points(report.records_of(report.load(fakes))))
    shown = {axis.get_title(): [line.get_xydata().tolist() for line in axis.lines]
             for axis in report.draw(points, "stored images", "A_last", str).axes}
    assert shown["cifar100"] == [[[5, 32], [20, 32]], [[5, 60], [20, 60]], [[5, 42], [20, 44]]]
    report_of(fakes, "fig-nme")
    picture = fakes / "paper" / "figures" / "fig-nme.png"
    picture.write_bytes(b"by another matplotlib")
    report_of(fakes, "fig-nme")
    assert picture.read_bytes() == b"by another matplotlib"
    fake_run(fakes, rows={"ldc": 1.0, "nme-5": 2.0})
    report_of(fakes, "fig-nme")
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_tables_need_neither_torch_nor_matplotlib(fakes, monkeypatch, capsys):
    code = "import sys, report; report.main(sys.argv[1:]); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, str(fakes), "--only", "table1"], cwd=HERE,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert report.main([str(fakes), "--only", "table5", "fig-nme"]) == 1
    assert "fig-nme.** Not drawn: matplotlib is missing (pip" in capsys.readouterr().err
    assert points_of(fakes, "fig-nme")


def test_report_says_in_one_sentence_what_is_wrong(tmp_path, capsys):
    fake_run(tmp_path, rows={})
    for flags, words in (([f"{tmp_path}/nowhere"], "nowhere holds no runs at any scale"),
                         ([str(tmp_path), "--scale", "small"], "no runs at small scale")):
        assert report.main(flags) == 2
        error, = capsys.readouterr().err.splitlines()
        assert error.startswith("error: ") and words in error


def test_recorded_runs_differ_from_the_presets_by_what_they_say():
    for path in (HERE / "results").rglob("result.json"):
        recorded = json.loads(path.read_text())
        which = recorded["strategy"], recorded["dataset"], recorded["scale"]
        classes = len(recorded["class_order"])
        presets = {"tasks": 5 if recorded["dataset"] == "demo" else 10, "first_classes": None,
                   "classes": data.DATASETS[recorded["dataset"]].classes or classes,
                   **run.preset_settings(*which), **run.preset_options(*which)}
        presets = json.loads(json.dumps(presets))  # lists for tuples
        used = {**recorded, **recorded["settings"], **recorded["options"], "classes": classes}
        assert recorded["finished"] and recorded["changed"].keys() <= presets.keys()
        for name in presets.keys() & used.keys() - {"label_fraction", "buffer_size"}:
            assert used[name] == recorded["changed"].get(name, presets[name]), (path, name)


def test_committed_texts_and_figures_are_made_from_the_committed_files(tmp_path, capsys):
    """`python report.py results` leaves a clean clone clean."""
    shutil.copytree(HERE / "results", tmp_path / "results")
    names = ["README.md", "results/README.md"]
    for name in names:
        text = (HERE / name).read_text(encoding="utf-8")
        old = re.sub(f"(?s){report.BEGIN}.*{report.END}", report.BEGIN + report.END, text)
        (tmp_path / name).write_text(old, encoding="utf-8")
    folder = str(tmp_path / "results")
    assert report.main([folder, "--scale", "small", "--only", "table1"]) == 0
    assert re.findall("Table .|fig-toy|Scale .*", capsys.readouterr().out) == [
        "Scale small", "Table 1"]
    assert report.BEGIN + report.END in (tmp_path / "README.md").read_text(encoding="utf-8")
    assert report.main([folder]) == 0
    names += [str(path.relative_to(HERE)) for path in (HERE / "results").rglob("figures/*")]
    for name in names:
        assert (tmp_path / name).read_bytes() == (HERE / name).read_bytes(), name
    (tmp_path / "README.md").write_text("no markers")
    assert report.main([folder]) == 2
    assert (tmp_path / "README.md").read_text() == "no markers"
