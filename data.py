"""Images become a stream of tasks, on the device that trains.

load() decodes a data set once into a cache file of uint8 squares, TaskStream deals its classes out as tasks, and
augment, clean, two_views and multi_crop turn batches of squares into network input on the device. An augmentation has
two halves: draw_*() draws the parameters of all samples from a CPU generator, apply_*() works where the images are.

    python data.py --dataset cifar100        # look at your data: counts, means, speeds, one picture per pipeline
"""
import argparse
import copy
import functools
import hashlib
import json
import math
import os
import pickle
import sys
import tempfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F


class UserError(Exception):
    """One sentence for the person at the terminal: what was wrong, where, and what to do about it."""


# ---------------------------------------------------------------------------------------------------------------------
# Pixels: crops, resizing, normalisation. Images are (B, 3, H, W); per-sample parameters have length B.


def to_device(plan, device):
    """A drawn plan with its tensors on `device`; pinned and asynchronous on CUDA, so that no step waits for it."""
    if isinstance(plan, torch.Tensor):
        return plan.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else plan.to(device)
    if isinstance(plan, dict):
        return {key: to_device(value, device) for key, value in plan.items()}
    if isinstance(plan, (list, tuple)):
        return type(plan)(to_device(value, device) for value in plan)
    return plan


def normalise(images, mean, std):
    """Pixels in 0..255 -> float32 (x/255 - mean) / std, channel by channel; a float input is overwritten."""
    out = images.to(torch.float32)
    for c in range(3):  # python numbers: no constant has to be on the device
        out[:, c].mul_(1 / (255 * std[c])).sub_(mean[c] / std[c])
    return out


def crop(images, top, left, size):
    """The size x size window of each image at its own (top, left)."""
    windows = images.unfold(2, size, 1).unfold(3, size, 1)
    return windows[torch.arange(len(images), device=images.device), :, top, left]


def flip_some(images, flip):
    """Mirror the images where flip (B,) is true."""
    return torch.where(flip.view(-1, 1, 1, 1), images.flip(3), images)


def centre_crop(images, size):
    """The central size x size window, placed as torchvision's CenterCrop does."""
    edge = round((images.shape[-1] - size) / 2)
    return images[..., edge:edge + size, edge:edge + size]


def resize_matrix(start, length, out, size, cubic, flip=None):
    """Weights (B, out, size) by which Pillow resizes the pixels [start, start + length) of a row of `size` to `out`.

    Triangle or cubic (a = -0.5) filter, widened by the scale when shrinking (antialiasing); flip mirrors the output.
    """
    pixel = torch.arange(size, device=start.device, dtype=torch.float32)
    scale = length / out
    centre = start[:, None] + (torch.arange(out, device=start.device) + 0.5) * scale[:, None]
    if flip is not None:
        centre = torch.where(flip[:, None], centre.flip(1), centre)
    distance = (pixel + 0.5 - centre[:, :, None]).div_(scale.clamp(min=1)[:, None, None]).abs_()
    if cubic:  # truncated powers: u^2 (u-1) / 2 on |d| < 2 plus v^2 (1 - 2v) on |d| < 1
        u = distance.neg_().add_(2).clamp_(min=0)
        v = (u - 1).clamp_(min=0)
        weight = (u * u).mul_(u - 1).mul_(0.5).add_((v * v).mul_(1 - 2 * v))
    else:
        weight = distance.neg_().add_(1).clamp_(min=0)
    inside = (pixel >= start[:, None]) & (pixel < (start + length)[:, None])
    weight.mul_(inside[:, None])
    return weight.div_(weight.sum(2, keepdim=True))


def resized_crop(images, box, size, cubic=False, flip=None):
    """Cut box (B, 4) = top, left, height, width and resize it to size x size; float32 in the input's range, unclamped.

    Two matrix products per image: exact for any box, antialiased, and the mirror image costs nothing.
    """
    top, left, height, width = box.unbind(1)
    rows = resize_matrix(top, height, size, images.shape[2], cubic)
    columns = resize_matrix(left, width, size, images.shape[3], cubic, flip)
    x = images.to(torch.float32).flatten(1, 2) @ columns.mT
    return rows[:, None] @ x.unflatten(1, (3, -1))


def draw_boxes(n, side, area, generator, ratio=(3 / 4, 4 / 3)):
    """torchvision's RandomResizedCrop.get_params for n square images at once: (n, 4) top, left, height, width.

    Ten tries per image at an area share and a log-uniform aspect ratio; where none fits, the whole image.
    """
    share = torch.empty(n, 10).uniform_(*area, generator=generator) * side * side
    aspect = torch.empty(n, 10).uniform_(math.log(ratio[0]), math.log(ratio[1]), generator=generator).exp()
    height, width = (share / aspect).sqrt().round(), (share * aspect).sqrt().round()
    fits = (height > 0) & (height <= side) & (width > 0) & (width <= side)
    first = fits.int().argmax(1, keepdim=True)
    size = torch.stack([height.gather(1, first), width.gather(1, first)], 1).squeeze(2)
    size[~fits.any(1)] = side
    corner = (torch.rand(n, 2, generator=generator) * (side - size + 1)).floor()
    return torch.cat([corner, size], 1)


def rotate4(x):
    """Each image and its quarter turns, counter-clockwise: (B, 3, s, s) -> (4B, 3, s, s), image-major (PASS, EFC)."""
    return torch.stack([x.rot90(k, (2, 3)) for k in range(4)], 1).flatten(0, 1)


# ---------------------------------------------------------------------------------------------------------------------
# AutoAugment, CIFAR-10 policy (Cubuk et al. 2019), operations and magnitudes as torchvision has them, grey fill.
# differs: the authors' code shears with bicubic interpolation, does not truncate translations, solarises from 256 down.

FILL = 128
POLICY = [pair.split() for pair in """
    Invert .1 0 Contrast .2 6;       Rotate .7 2 TranslateX .3 9;     Sharpness .8 1 Sharpness .9 3;
    ShearY .5 8 TranslateY .7 9;     AutoContrast .5 0 Equalize .9 0; ShearY .2 7 Posterize .3 7;
    Color .4 3 Brightness .6 7;      Sharpness .3 9 Brightness .7 9;  Equalize .6 0 Equalize .5 0;
    Contrast .6 7 Sharpness .6 5;    Color .7 7 TranslateX .5 8;      Equalize .3 0 AutoContrast .4 0;
    TranslateY .4 3 Sharpness .2 6;  Brightness .9 6 Color .2 8;      Solarize .5 2 Invert .0 0;
    Equalize .2 0 AutoContrast .6 0; Equalize .2 0 Equalize .6 0;     Color .9 9 Equalize .6 0;
    AutoContrast .8 0 Solarize .2 8; Brightness .1 3 Color .7 0;      Solarize .4 5 AutoContrast .9 0;
    TranslateY .9 9 TranslateY .7 9; AutoContrast .9 0 Solarize .8 3; Equalize .8 0 Invert .1 0;
    TranslateY .7 9 AutoContrast .9 0""".split(";")]  # 25 pairs of: operation, probability, magnitude index
BLENDS = ("Brightness", "Color", "Contrast", "Sharpness")
AFFINE = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")


def magnitude(op, index, side):
    """torchvision's magnitude number `index` of 0..9 for images of this side."""
    if op == "Posterize":
        return 8 - round(index / 9 * 4)
    ends = {"Shear": (0, 0.3), "Trans": (0, 150 / 331 * side), "Rotat": (0, 30), "Solar": (255, 0)}
    value = torch.linspace(*ends.get(op[:5], (0, 0.9)), 10)[index].item()
    return int(value) if op.startswith("Trans") else value


def op_parameters(op, value, side):
    """The tensor an operation takes, float32 with one row per image, from its signed magnitudes (k,) in float64.

    Blends: (k, 2) ratio and 1 - ratio; affine ones: (k, 2, 3) maps from output to input pixels about the image centre.
    """
    if op in BLENDS:
        return torch.stack([1 + value, -value], 1).float()
    if op not in AFFINE:
        return value.float()
    matrix = torch.eye(2, 3, dtype=torch.float64).repeat(len(value), 1, 1)
    axis = int(op.endswith("Y"))
    if op == "Rotate":
        cos, sin = value.deg2rad().cos(), value.deg2rad().sin()
        matrix[:, 0, 0], matrix[:, 0, 1], matrix[:, 1, 0], matrix[:, 1, 1] = cos, -sin, sin, cos
    elif op.startswith("Shear"):
        matrix[:, axis, 1 - axis] = value
        matrix[:, axis, 2] = value * side / 2  # the upper left corner stays where it is
    else:
        matrix[:, axis, 2] = -value
    return matrix.float()


@functools.lru_cache
def policy_tables(side):
    """The policy as (25, 2) tables: operation as a number into names, probability, magnitude; and the names."""
    names = sorted({pair[i] for pair in POLICY for i in (0, 3)})
    entries = [[(names.index(pair[i]), float(pair[i + 1]), magnitude(pair[i], int(pair[i + 2]), side)) for i in (0, 3)]
               for pair in POLICY]
    ops, chance, size = torch.tensor(entries, dtype=torch.float64).unbind(2)
    return names, ops.long(), chance.float(), size


def draw_autoaugment(n, side, generator):
    """The policy's two steps for n images: each a dictionary operation -> (image numbers (k,), parameters (k, ...))."""
    names, ops, chance, size = policy_tables(side)
    pair = torch.randint(len(POLICY), (n,), generator=generator)
    active = torch.rand(n, 2, generator=generator) <= chance[pair]
    sign = torch.randint(2, (n, 2), generator=generator) * 2 - 1
    steps = []
    for i in (0, 1):
        chosen = torch.where(active[:, i], ops[pair, i], -1)
        step = {}
        for k, op in enumerate(names):
            index = (chosen == k).nonzero().squeeze(1)
            if len(index):
                value = size[pair[index], i] * (sign[index, i] if op in BLENDS + AFFINE else 1)
                step[op] = (index, op_parameters(op, value, side))
        affine = [step.pop(op) for op in AFFINE if op in step]  # one kernel for all of them
        if affine:
            step["Affine"] = tuple(torch.cat(part) for part in zip(*affine))
        steps.append(step)
    return steps


def apply_autoaugment(images, steps):
    """Run the drawn steps on uint8 images, in place; images without an operation are not touched."""
    for step in steps:
        for op, (index, parameters) in step.items():
            images.index_copy_(0, index, OPERATIONS[op](images[index], parameters))
    return images


def affine(images, matrix):
    """Nearest-neighbour look-up through (k, 2, 3) maps; what falls outside is grey."""
    k, _, height, width = images.shape
    x = torch.arange(width, device=images.device) - (width - 1) / 2
    y = (torch.arange(height, device=images.device) - (height - 1) / 2)[:, None]
    a = matrix[..., None, None]
    column = (a[:, 0, 0] * x + a[:, 0, 1] * y + a[:, 0, 2] + (width - 1) / 2).round()
    row = (a[:, 1, 0] * x + a[:, 1, 1] * y + a[:, 1, 2] + (height - 1) / 2).round()
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    source = (row * width + column).long().clamp_(0, height * width - 1).flatten(1)
    moved = images.flatten(2).gather(2, source[:, None].expand(-1, 3, -1)).view_as(images)
    return torch.where(inside[:, None], moved, FILL)


def gray(images):
    """Luma (k, 1, H, W) in float32 with torchvision's weights, added in its order so that roundings agree."""
    r, g, b = images.to(torch.float32).split(1, dim=1)
    return (r * 0.2989).add_(g, alpha=0.587).add_(b, alpha=0.114)


def blend(images, other, parameters):
    """ratio * images + (1 - ratio) * other, clamped and truncated to uint8; parameters (k, 2) = ratio, 1 - ratio."""
    ratio, rest = parameters[:, :, None, None, None].unbind(1)
    return torch.addcmul(images.to(torch.float32).mul_(ratio), other, rest).clamp_(0, 255).to(torch.uint8)


def brightness(images, parameters):
    """Blend with black."""
    return images.to(torch.float32).mul_(parameters[:, 0, None, None, None]).clamp_(0, 255).to(torch.uint8)


def sharpness(images, parameters):
    """Blend with a 3 x 3 smoothing (centre weight 5 of 13) that leaves the border alone."""
    x = images.to(torch.float32)
    rows = x[:, :, :-2] + x[:, :, 1:-1] + x[:, :, 2:]
    inner = x[:, :, 1:-1, 1:-1]
    smooth = (rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]).add_(inner, alpha=4).div_(13).round_()
    inner.copy_(torch.addcmul(inner, smooth.sub_(inner), parameters[:, 1, None, None, None]))
    return x.clamp_(0, 255).to(torch.uint8)


def autocontrast(images, _):
    """Stretch each channel to 0..255; a flat channel stays."""
    low = images.flatten(2).amin(2)[..., None, None].to(torch.float32)
    high = images.flatten(2).amax(2)[..., None, None].to(torch.float32)
    flat = high == low
    scale = torch.where(flat, 1.0, (high - low) * (1 / 255))
    return (images.to(torch.float32) - torch.where(flat, 0.0, low)).div_(scale).clamp_(0, 255).to(torch.uint8)


def equalize(images, _=None):
    """Pillow's histogram equalisation of each channel through a table of 256 entries; (k, C, H, W) uint8."""
    pixels = images.flatten(2).long()
    one = torch.ones((), dtype=torch.int32, device=images.device)
    counts = torch.zeros(*pixels.shape[:2], 256, dtype=torch.int32, device=images.device)
    counts.scatter_add_(2, pixels, one.expand_as(pixels))
    brightest = counts.gather(2, pixels.amax(2, keepdim=True))
    step = (pixels.shape[2] - brightest) // 255
    below = counts.cumsum(2) - counts
    table = ((below + step // 2) // step.clamp(min=1)).clamp_(0, 255)
    table = torch.where(step == 0, torch.arange(256, device=images.device), table).to(torch.uint8)
    return table.gather(2, pixels).view_as(images)


def contrast(images, parameters):
    """Blend with the image's mean luma."""
    return blend(images, gray(images).floor_().mean((1, 2, 3), keepdim=True), parameters)


OPERATIONS = {
    "Affine": affine, "Brightness": brightness, "Contrast": contrast, "Sharpness": sharpness,
    "AutoContrast": autocontrast, "Equalize": equalize, "Invert": lambda images, _: 255 - images,
    "Color": lambda images, parameters: blend(images, gray(images).floor_(), parameters),
    "Posterize": lambda images, bits: images & (256 - 2 ** (8 - bits)).to(torch.uint8)[:, None, None, None],
    "Solarize": lambda images, start: torch.where(images >= start[:, None, None, None], 255 - images, images)}


# ---------------------------------------------------------------------------------------------------------------------
# Self-supervised views. Pixels are float32 in 0..255 from the crop to the normalisation.
# differs: Pillow rounds to whole levels after every step, we never do.


@dataclass(frozen=True)
class View:
    """One random view: crop `area` of the image to `size`, then each step with its probability."""
    size: int
    area: tuple = (0.08, 1.0)
    cubic: bool = False
    jitter: tuple = (0.4, 0.4, 0.4, 0.1)  # brightness, contrast, saturation, hue; applied with probability 0.8
    gray: float = 0.2
    blur: float = 0.0
    solarise: float = 0.0
    threshold: float | None = 128  # None: uniform in 0..256
    equalise: float = 0.0


def view_recipes(recipe, size):
    """The views of a recipe at an image size: up to 64 pixels as the repositories treat CIFAR, above as ImageNet.

    asymmetric: Barlow Twins in CaSSLe and PFR; symmetric: SimCLR in POCON; mild and crops: ours, for few steps; multi: NNCSL, two
    large and two small crops.
    """
    large = size > 64
    if recipe == "asymmetric":
        view = View(size, cubic=True, jitter=(0.4, 0.4, 0.2, 0.1))
        return replace(view, blur=1.0 * large), replace(view, blur=0.1 * large, solarise=0.2)
    if recipe == "symmetric":
        return (View(size, blur=0.5 if size >= 64 else 0.0),) * 2
    if recipe in ("mild", "crops"):
        view = View(size, (0.3, 1.0), gray=0.0)
        return (view if recipe == "mild" else replace(view, jitter=(0.0,) * 4),) * 2
    if recipe != "multi":
        raise ValueError(f"unknown recipe {recipe!r}")
    if large:
        view = View(size, (0.14, 1.0), jitter=(0.8, 0.8, 0.8, 0.2), blur=0.5)
        return (view,) * 2 + (replace(view, size=round(size * 96 / 224), area=(0.05, 0.14)),) * 2
    view = View(size, (0.75, 1.0), gray=0.0, solarise=0.2, threshold=None, equalise=0.2)
    return (view,) * 2 + (replace(view, size=round(size * 18 / 32), area=(0.3, 0.75)),) * 2


def draw_view(n, side, view, generator):
    """Parameters of one view of n images: box, flip, jitter, and for each further step the numbers of its images."""
    def some(chance):
        return (torch.rand(n, generator=generator) < chance).nonzero().squeeze(1)

    plan = {"box": draw_boxes(n, side, view.area, generator), "flip": torch.rand(n, generator=generator) < 0.5}
    spread = torch.tensor(view.jitter)
    low = torch.cat([(1 - spread[:3]).clamp(min=0), -spread[3:]])
    factors = low + torch.rand(n, 4, generator=generator) * (torch.cat([1 + spread[:3], spread[3:]]) - low)
    on = torch.rand(n, 1, generator=generator) < 0.8
    plan["jitter"] = torch.where(on, factors, torch.tensor([1.0, 1.0, 1.0, 0.0]))
    # differs: torchvision draws the order of the four for each image, we for each group of 64 images (or an eighth)
    plan["group"] = max(64, -(-n // 8))
    plan["orders"] = [torch.randperm(4, generator=generator).tolist() for _ in range(0, n, plan["group"])]
    plan["gray"] = some(view.gray)
    plan["blur"] = some(view.blur)
    plan["sigma"] = 0.1 + 1.9 * torch.rand(len(plan["blur"]), generator=generator)
    plan["solarise"] = some(view.solarise)
    drawn = 256 * torch.rand(len(plan["solarise"]), generator=generator)
    plan["threshold"] = drawn if view.threshold is None else torch.full_like(drawn, view.threshold)
    plan["equalise"] = some(view.equalise)
    return plan


def apply_view(images, plan, view):
    """One view of uint8 images: float32 (B, 3, view.size, view.size) in 0..255."""
    x = resized_crop(images, plan["box"], view.size, view.cubic, plan["flip"]).clamp_(0, 255)
    for k, order in enumerate(plan["orders"]):
        part = slice(k * plan["group"], (k + 1) * plan["group"])
        colour_jitter(x[part], plan["jitter"][part], order)
    for step, work in (("gray", gray), ("blur", lambda y: gaussian_blur(y, plan["sigma"])),
                       ("solarise", lambda y: torch.where(y >= plan["threshold"][:, None, None, None], 255 - y, y)),
                       ("equalise", lambda y: equalize(y.round().to(torch.uint8)).to(torch.float32))):
        index = plan[step]
        if len(index):
            x.index_copy_(0, index, work(x[index]).expand(-1, 3, -1, -1))
    return x


def colour_jitter(x, factors, order):
    """torchvision's ColorJitter in place on float images in 0..255; factors (B, 4), order: a permutation of 0..3."""
    for op in order:
        f = factors[:, op, None, None, None]
        if op == 0:
            x.mul_(f).clamp_(max=255)
        elif op == 1:
            luma = gray(x.mean((2, 3), keepdim=True))  # the mean luma is the luma of the mean
            x.mul_(f).add_((1 - f) * luma).clamp_(0, 255)
        elif op == 2:
            luma = gray(x)  # before x changes
            x.mul_(f).add_((1 - f) * luma).clamp_(0, 255)
        else:
            shift_hue(x, f[:, 0])


def shift_hue(x, turn):
    """Rotate the hue of float images in place by turn (B, 1, 1) of the HSV hexagon; value and chroma stay."""
    r, g, b = x.unbind(1)
    low, high = x.aminmax(dim=1)
    chroma = high - low
    hue = torch.where(high == r, g - b, torch.where(high == g, b - r + 2 * chroma, r - g + 4 * chroma))
    hue = hue.div_(chroma.clamp(min=1e-6)).add_(6 * turn).remainder_(6)
    torch.add(low, (hue - 3).abs_().sub_(1).clamp_(0, 1).mul_(chroma), out=r)
    torch.add(low, (hue - 2).abs_().neg_().add_(2).clamp_(0, 1).mul_(chroma), out=g)
    torch.add(low, hue.sub_(4).abs_().neg_().add_(2).clamp_(0, 1).mul_(chroma), out=b)


def gaussian_blur(x, sigma):
    """Blur each image with its own sigma (k,), reflected at the border; the window is 23 pixels at 224."""
    last, radius = x.shape[-1] - 1, x.shape[-1] // 20  # 11 at 224
    i = torch.arange(last + 1, device=x.device)
    weight = 0  # of input pixel i for output pixel j: directly, and by its mirror images beyond either edge
    j = i[:, None]
    for distance, exists in (((j - i).abs(), i >= 0), (j + i, i > 0), (2 * last - j - i, i < last)):
        weight = weight + torch.exp(-0.5 * (distance / sigma[:, None, None]) ** 2) * ((distance <= radius) & exists)
    weight = weight / weight.sum(2, keepdim=True)
    return weight[:, None] @ (x.flatten(1, 2) @ weight.mT).unflatten(1, (3, -1))


# ---------------------------------------------------------------------------------------------------------------------
# From image files to one uint8 array per split, decoded once into a cache file.

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".gif")
DECODER = 1  # part of every fingerprint: raise it when decode() changes


@dataclass(frozen=True)
class Form:
    """How an image becomes the stored square: short side to `side` and the centre cut out, or squashed."""
    side: int
    squash: bool = False
    cubic: bool = False


def decode(path, form):
    """One image file of any mode -> uint8 (3, side, side), resized by Pillow with antialiasing, as torchvision does."""
    from PIL import Image
    try:
        with Image.open(path) as image:
            if image.mode.startswith("I"):  # 16 bits of grey: convert() would clip them instead of scaling
                image = Image.fromarray((np.asarray(image) / 256).astype(np.uint8))
            image = image.convert("RGB")
    except Exception as error:  # Pillow raises many kinds
        raise UserError(f"cannot read the image {path} ({error}): replace or delete it") from None
    side, short = form.side, min(image.size)
    size = tuple(side if form.squash or length == short else int(side * length / short) for length in image.size)
    if size != image.size:
        image = image.resize(size, Image.Resampling.BICUBIC if form.cubic else Image.Resampling.BILINEAR)
    left, top = round((size[0] - side) / 2), round((size[1] - side) / 2)
    return np.ascontiguousarray(np.asarray(image)[top:top + side, left:left + side].transpose(2, 0, 1))


class Split:
    """The images of one split sorted by class: uint8 (N, 3, S, S), usually a memory map of a cache file."""

    def __init__(self, images, counts, checks=(), file=None):
        self.images, self.counts, self.checks, self.file = images, counts, dict(enumerate(checks)), file
        self.starts = np.concatenate([[0], np.cumsum(counts)])

    def of(self, c):
        """The images of class c, a view; their checksum is compared the first time they are read."""
        part = self.images[self.starts[c]:self.starts[c + 1]]
        if c in self.checks and zlib.crc32(part) != self.checks[c]:
            raise UserError(f"the cache file {self.file} is damaged: delete it, and it will be built again")
        self.checks.pop(c, None)
        return torch.from_numpy(part)


def list_images(folder):
    """(path, size, mtime) of all images under a folder, sorted by path."""
    found = []
    for entry in os.scandir(folder):
        if entry.is_dir():
            found += list_images(entry.path)
        elif entry.name.lower().endswith(SUFFIXES) and not entry.name.startswith("."):
            stat = entry.stat()
            found.append((entry.path, stat.st_size, stat.st_mtime_ns))
    return sorted(found)


class Progress:
    """One line that updates itself on a terminal; elsewhere a line every ten seconds and at the end."""

    def __init__(self, what, total, quiet, unit="images"):
        self.what, self.total, self.quiet, self.unit = what, total, quiet, unit
        self.start = self.last = time.time()

    def show(self, done):
        live, now = sys.stderr.isatty(), time.time()
        if not self.quiet and (done == self.total or now - self.last > (0.2 if live else 10)):
            text, self.last = f"{self.what}: {done:,} of {self.total:,} {self.unit}, {now - self.start:.0f} s", now
            print("\r" * live + text, end="" if live and done < self.total else "\n", file=sys.stderr, flush=True)


def write_cache(file, fingerprint, items, read, side, progress, workers):
    """Decode and write one .npy array, then its index as JSON, then the length of that: a file cut short has no index.

    items: one list per class; read(item) -> uint8 (3, side, side).
    """
    counts, checks, done = [len(part) for part in items], [], 0
    header = {"descr": "|u1", "fortran_order": False, "shape": (sum(counts), 3, side, side)}
    np.lib.format.write_array_header_1_0(file, header)
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:  # Pillow decodes without the interpreter lock
        for part in items:
            check = 0
            for i in range(0, len(part), 256):  # in pieces, so that decoded images never pile up in memory
                for image in pool.map(read, part[i:i + 256]):
                    check = zlib.crc32(image, check)
                    file.write(image)
                done += len(part[i:i + 256])
                progress.show(done)
            checks.append(check)
    index = json.dumps({"fingerprint": fingerprint, "counts": counts, "checks": checks}).encode()
    file.write(index + len(index).to_bytes(8, "little"))


def read_cache(path, fingerprint):
    """The Split in a cache file, or None where there is none, or it is cut short, or made from other data."""
    try:
        with open(path, "rb") as file:
            file.seek(-8, os.SEEK_END)
            length = int.from_bytes(file.read(8), "little")
            file.seek(-8 - length, os.SEEK_END)
            index = json.loads(file.read(length))
        if index["fingerprint"] == fingerprint:  # copy on write: nothing can change the file
            return Split(np.load(path, mmap_mode="c"), index["counts"], index["checks"], path)
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        pass
    return None


def cached(folders, name, fingerprint, items, read, side, workers, quiet):
    """The Split of this fingerprint: from the first folder that has its cache file, else decoded into the first writable.

    items() -> one list per class, read(item) -> uint8 image; called only when something has to be decoded.
    """
    for folder in folders:
        if split := read_cache(folder / f"{name}.npy", fingerprint):
            return split
    items = items()
    with tempfile.TemporaryDirectory() as last_resort:  # its files live as long as they are mapped
        for folder in [*folders, Path(last_resort)]:
            part = folder / f"{name}.{os.getpid()}.tmp"  # renamed at the end: two processes at once do no harm
            try:
                folder.mkdir(parents=True, exist_ok=True)
                progress = Progress(name, sum(map(len, items)), quiet)
                with open(part, "wb") as file:
                    write_cache(file, fingerprint, items, read, side, progress, workers)
                os.replace(part, folder / f"{name}.npy")
                return read_cache(folder / f"{name}.npy", fingerprint)
            except OSError as error:
                print(f"no cache in {folder} ({error.strerror}), trying elsewhere", file=sys.stderr)
            finally:
                part.unlink(missing_ok=True) if folder.is_dir() else None
    raise UserError(f"{name}: no space to decode {sum(map(len, items)):,} images into; free some in {folders[0]}")


# ---------------------------------------------------------------------------------------------------------------------
# Finding the data sets on disk.


@dataclass
class Found:
    """names: sorted class names; files: {"train" or "test": one list of (path, size, mtime) per class}."""
    names: list
    files: dict
    arrays: object = None  # split -> one list of uint8 images per class, where the files are not images


def find_root(data_dir, *names):
    """The folder with train/ in it: data_dir/<name>, the same doubled, or data_dir if it has such a name; else None."""
    bases = [data_dir / name for name in names] + [data_dir] * (data_dir.resolve().name in names)
    return next((root for base in bases for root in (base, base / base.name) if (root / "train").is_dir()), None)


def class_folders(folder):
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


def class_files(folder, names=None):
    """{class: its image files} of a folder of class folders, or of those in names."""
    files = {name: list_images(folder / name) for name in class_folders(folder) if names is None or name in names}
    for name in files:
        if not files[name]:
            raise UserError(f"the class folder {folder / name} holds no image (.jpg, .png ...): fill or remove it")
    if not files:
        raise UserError(f"{folder} has no class folders: put the images of each class into a folder of its own there")
    return files


def matched(root, train, held_out, test):
    """Both splits, which must have the same classes."""
    for name in sorted(set(train) ^ set(test)):
        there, missing = (held_out, root / "train") if name in test else (root / "train", held_out)
        raise UserError(f"class {name!r} is in {there} but not in {missing}: both need the same classes")
    names = sorted(train)
    return Found(names, {"train": [train[name] for name in names], "test": [test[name] for name in names]})


def by_class(root, names=None):
    """The layout root/{train,test or val}/<class>/*, or only the classes in names."""
    held_out = next((root / part for part in ("test", "val") if (root / part).is_dir()), None)
    if held_out is None:
        raise UserError(f"{root} has train but neither test nor val: put held-out images into {root}/test/<class>/")
    return matched(root, class_files(root / "train", names), held_out, class_files(held_out, names))


def listed_classes(class_list, root):
    """Class names from a text file, one per line or the first word of each line; they must be folders of root/train."""
    try:
        lines = [line.strip() for line in Path(class_list).read_text().splitlines() if line.strip()]
    except OSError as error:
        raise UserError(f"cannot read the class list {class_list} ({error.strerror})") from None
    present = set(class_folders(root / "train"))
    names = [line if line in present else line.split()[0] for line in lines]
    for name in names or ["(nothing)"]:
        if name not in present:
            raise UserError(f"the class list {class_list} has {name}: expected names of folders in {root / 'train'}")
    return names


def find_folder(data_dir, class_list):
    """Anybody's images."""
    root = find_root(data_dir, ".")
    if root is None:
        raise UserError(f"{data_dir} has no train folder: expected {data_dir}/train/<class>/* and .../test/<class>/*")
    return by_class(root, listed_classes(class_list, root) if class_list else None)


def find_cars(data_dir, _):
    """Stanford Cars; class ids by sorted folder name, as SLCA has them."""
    root = find_root(data_dir, "stanford_cars", "cars", "cars196", "car_data")
    if root is None:
        raise UserError(f"Stanford Cars not found in {data_dir}: sort it into {data_dir}/stanford_cars/train/<class>/*.jpg "
                        "and .../test/<class>/*.jpg (the original download is gone; by-class copies are on Kaggle)")
    return by_class(root)


def find_imagenet100(data_dir, class_list):
    """The seed-1993 subset: of ImageNet's sorted classes the first 100 of RandomState(1993).permutation(1000)."""
    root = find_root(data_dir, "imagenet100", "imagenet", "ILSVRC2012", ".")
    if root is None:
        raise UserError(f"ImageNet not found in {data_dir}: expected {data_dir}/imagenet100/train/<wnid>/* and "
                        ".../val/<wnid>/*, with all 1000 classes or the 100 of the subset")
    names = listed_classes(class_list, root) if class_list else class_folders(root / "train")
    if not class_list and len(names) == 1000:
        names = [names[i] for i in np.random.RandomState(1993).permutation(1000)[:100]]
    elif not class_list and len(names) != 100:
        raise UserError(f"{root / 'train'} has {len(names)} class folders: expected 1000 or 100, or a --class-list")
    return by_class(root, set(names))


TINY = ("http://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de")


def find_tinyimagenet(data_dir, _):
    """Tiny-ImageNet as in its zip (val_annotations.txt) or with val sorted into class folders; downloaded if absent."""
    root = find_root(data_dir, "tiny-imagenet-200") or download_zip(*TINY, data_dir / "tiny-imagenet-200")
    train, val, test = class_files(root / "train"), root / "val", {}
    if any((val / name).is_dir() for name in train):
        return matched(root, train, val, class_files(val, set(class_folders(val)) - {"images"}))
    try:
        rows = [line.split("\t") for line in (val / "val_annotations.txt").read_text().splitlines()]
        present = {os.path.basename(file[0]): file for file in list_images(val / "images")}
        for name, wnid, *_ in rows:
            test.setdefault(wnid, []).append(present[name])
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"{val} is incomplete ({error}): expected images and val_annotations.txt, or class folders") from None
    return matched(root, train, val, test)


def download(url, target, by_hand):
    """Fetch a file under a temporary name and rename it when it is complete; UserError ends with the way by hand."""
    import http.client
    import urllib.request
    part = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(url, timeout=30) as source, open(part, "wb") as file:
            size = int(source.headers.get("Content-Length") or 0)
            progress = Progress(f"downloading {url}", size >> 20, False, "MB")
            while block := source.read(1 << 20):
                file.write(block)
                progress.show(file.tell() >> 20)
            if file.tell() < size:
                raise OSError(f"{file.tell()} of {size} bytes came")
        os.replace(part, target)
    except (OSError, http.client.HTTPException) as error:
        part.unlink(missing_ok=True) if target.parent.is_dir() else None
        reason = getattr(error, "reason", error)
        raise UserError(f"cannot download {url} to {target.parent} ({reason}): {by_hand}") from None
    return target


def download_zip(url, md5, target):
    """Fetch a zip, compare its checksum, unpack the one folder in it as `target`; nothing half done remains."""
    import zipfile
    by_hand = f"fetch it by hand and unzip it as {target}"
    file = download(url, target.with_name(f"{target.name}.zip"), by_hand)
    try:
        digest = hashlib.md5(file.read_bytes()).hexdigest()
        if digest != md5:
            raise UserError(f"{url} has checksum {digest} instead of {md5}: try again, or {by_hand}")
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download-") as folder:
            zipfile.ZipFile(file).extractall(folder)
            os.rename(next(path for path in Path(folder).iterdir() if path.is_dir()), target)
    except OSError as error:
        raise UserError(f"cannot unpack {file} ({error}): {by_hand}") from None
    finally:
        file.unlink()
    return target


def find_cifar100(data_dir, _):
    """CIFAR-100 in by-class folders, or torchvision's copy, downloaded if absent; class ids by sorted fine label."""
    if root := find_root(data_dir, "cifar100"):
        return by_class(root)
    folder = data_dir / "cifar-100-python"

    def contents(name):
        with open(folder / name, "rb") as file:
            return pickle.load(file, encoding="latin1")

    def arrays(split):
        batch = contents(split)
        images, labels = np.asarray(batch["data"]).reshape(-1, 3, 32, 32), np.asarray(batch["fine_labels"])
        return [list(images[labels == label]) for label in np.argsort(names)]
    try:
        if not folder.is_dir():
            from torchvision.datasets import CIFAR100
            CIFAR100(data_dir, download=True)
        names = contents("meta")["fine_label_names"]
        stats = [(split, (folder / split).stat()) for split in ("train", "test")]
        files = {split: [[(str(folder / split), stat.st_size, stat.st_mtime_ns)]] for split, stat in stats}
    except (OSError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError, EOFError) as error:
        reason = getattr(error, "reason", error)
        raise UserError(f"cannot load CIFAR-100 from {folder} or the network ({reason}): delete that folder if it is damaged, "
                        f"or put the images into {data_dir}/cifar100/train/<class>/ and .../test/<class>/") from None
    return Found(sorted(names), files, arrays)


# ---------------------------------------------------------------------------------------------------------------------
# Data sets.


@dataclass(frozen=True)
class Spec:
    """What is particular to a data set."""
    find: object                # (data_dir, class_list) -> Found
    size: int                   # side of the network's input
    train: Form                 # how training images are stored
    test: Form | None = None    # how test images are, and training images for the clean pass; None: the same
    mean: tuple = (0.485, 0.456, 0.406)
    std: tuple = (0.229, 0.224, 0.225)
    pad: int | None = 0         # random crop after this padding; None: random resized crop
    autoaugment: bool = False   # brightness by 63/255, then the CIFAR-10 policy
    classes: int | None = None  # of a complete copy


DATASETS = {
    "demo": Spec(None, 16, Form(16), mean=(0.5,) * 3, std=(0.25,) * 3, pad=2),
    # differs: the self-supervised repositories each normalise CIFAR-100 by their own constants; here one set serves all
    "cifar100": Spec(find_cifar100, 32, Form(32), mean=(0.5071, 0.4867, 0.4408), std=(0.2675, 0.2565, 0.2761), pad=4,
                     autoaugment=True, classes=100),
    "tinyimagenet": Spec(find_tinyimagenet, 64, Form(64), pad=4, classes=200),
    # differs: random resized crops are cut from the centre square at 256 pixels, not from the whole photograph
    "imagenet100": Spec(find_imagenet100, 224, Form(256), pad=None, classes=100),
    "cars": Spec(find_cars, 224, Form(300, squash=True, cubic=True), Form(256, cubic=True), classes=196),
    "folder": Spec(find_folder, 64, Form(64), pad=8),
}


class Transform:
    """The augmentations of a data set, without its images: uint8 (B, 3, S, S) in, float32 (B, 3, s, s) out."""

    def __init__(self, name, image_size=None):
        if name not in DATASETS:
            raise UserError(f"unknown data set {name!r}: choose from {', '.join(DATASETS)}")
        spec = DATASETS[name]
        if image_size and (name != "folder" or not 8 <= image_size <= 1024):
            raise UserError(f"--image-size {image_size} with --dataset {name}: expected 8 to 1024, and folder")
        if image_size:  # up to 64 as CIFAR: pad and crop; above as ImageNet: random resized crop of a larger square
            small = image_size <= 64
            stored = Form(image_size if small else round(image_size * 8 / 7))
            spec = replace(spec, size=image_size, train=stored, pad=image_size // 8 if small else None)
        self.name, self.spec, self.image_size, self.mean, self.std = name, spec, spec.size, spec.mean, spec.std

    def decode(self, path):
        """One image file as an input of clean(): uint8 (3, S, S)."""
        return torch.from_numpy(decode(path, self.spec.test or self.spec.train))

    def draw_augment(self, n, generator=None):
        """Parameters of the supervised training transform for n images."""
        spec, side = self.spec, self.spec.train.side
        plan = {"flip": torch.rand(n, generator=generator) < 0.5}
        if spec.pad is None:
            plan["box"] = draw_boxes(n, side, (0.08, 1.0), generator)
        else:
            plan["corner"] = torch.randint(side + 2 * spec.pad - spec.size + 1, (2, n), generator=generator)
        if spec.autoaugment:
            plan["brightness"] = 1 + (torch.rand(n, 1, generator=generator) * 2 - 1) * (63 / 255)
            plan["autoaugment"] = draw_autoaugment(n, spec.size, generator)
        return plan

    def apply_augment(self, images, plan):
        """The supervised training transform with drawn parameters."""
        if self.spec.pad is None:
            x = resized_crop(images, plan["box"], self.image_size, flip=plan["flip"])
        else:
            padded = F.pad(images, (self.spec.pad,) * 4) if self.spec.pad else images
            x = flip_some(crop(padded, *plan["corner"], self.image_size), plan["flip"])
        if self.spec.autoaugment:
            x = apply_autoaugment(brightness(x, plan["brightness"]), plan["autoaugment"])
        return normalise(x, self.mean, self.std)

    def augment(self, images, generator=None):
        """The supervised training transform."""
        return self.apply_augment(images, to_device(self.draw_augment(len(images), generator), images.device))

    def clean(self, images):
        """The test transform: the centre, normalised."""
        return normalise(centre_crop(images, self.image_size), self.mean, self.std)

    def views(self, images, generator, recipe):
        """One batch for each view of a recipe (see view_recipes)."""
        batches = []
        for view in view_recipes(recipe, self.image_size):
            plan = to_device(draw_view(len(images), images.shape[-1], view, generator), images.device)
            batches.append(normalise(apply_view(images, plan, view), self.mean, self.std))
        return batches

    def two_views(self, images, generator=None, recipe="asymmetric"):
        """Two views of each image, by view_recipes's "asymmetric", "symmetric", "mild" or "crops"."""
        return tuple(self.views(images, generator, recipe))

    def multi_crop(self, images, generator=None):
        """NNCSL's views: [large, large, small, small]."""
        return self.views(images, generator, "multi")


class Dataset(Transform):
    """The images of a data set by class, with its augmentations."""

    def __init__(self, name, class_names, train, test, clean=None, image_size=None, limit=None):
        super().__init__(name, image_size)
        self.class_names, self.num_classes = class_names, len(class_names)
        self.class_list_md5 = hashlib.md5("\n".join(class_names).encode()).hexdigest()
        # class -> uint8 (n, 3, S, S), a view of the cache; at most `limit` images, for quick trials
        self.train_images, self.test_images = lambda c: train.of(c)[:limit], lambda c: test.of(c)[:limit]
        self.train_clean_images = (lambda c: clean.of(c)[:limit]) if clean else self.train_images
        self.train_counts, self.test_counts = ([min(n, limit or n) for n in split.counts] for split in (train, test))


def load(name, data_dir="data", *, image_size=None, class_list=None, limit=None, workers=None, quiet=False):
    """Find, decode once (see cached) and open a data set; UserError with one sentence where that is impossible.

    limit: use only the first so many training and test images of each class.
    """
    spec, data_dir = Transform(name, image_size).spec, Path(data_dir)
    if class_list and name not in ("imagenet100", "folder"):
        raise UserError(f"--class-list is for imagenet100 and folder, not for {name}")
    if name == "demo":
        return Dataset(name, *demo_images(spec.size, limit), limit=limit)
    if not data_dir.is_dir() and name not in ("cifar100", "tinyimagenet"):  # those two can be downloaded
        raise UserError(f"the data folder {data_dir} does not exist: create it or name another with --data-dir")
    found = spec.find(data_dir, class_list)
    if spec.classes not in (None, len(found.names)) and not quiet:
        print(f"{len(found.names)} of {spec.classes} classes found in {data_dir}", file=sys.stderr)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"  # for data that lie in a read-only folder
    folders = [data_dir / ".cache", Path(home, "ldc-data", short_hash(data_dir.resolve()))]

    def split(part, form):
        files = [[(path[len(str(data_dir)):], *stamp) for path, *stamp in files] for files in found.files[part]]
        fingerprint = hashlib.sha1(repr((DECODER, form, found.names, files)).encode()).hexdigest()
        tag = f"{name}-{part}-{'squash' * form.squash}{form.side}-{short_hash(found.names)}"
        if found.arrays:
            items, read = lambda: found.arrays(part), lambda image: image
        else:
            items = lambda: [[file[0] for file in files] for files in found.files[part]]  # noqa: E731
            read = lambda path: decode(path, form)  # noqa: E731
        return cached(folders, tag, fingerprint, items, read, form.side, workers, quiet)

    train, test_form = split("train", spec.train), spec.test or spec.train
    clean = split("train", test_form) if spec.test else None
    return Dataset(name, found.names, train, split("test", test_form), clean, image_size, limit)


def short_hash(thing):
    return hashlib.md5(repr(thing).encode()).hexdigest()[:8]


# ---------------------------------------------------------------------------------------------------------------------
# demo: drawn images. A class is a shape, a texture and a pair of colours; its neighbours share two of the three, so a
# backbone has to keep moving as tasks arrive. Position, angle, scale, colours, ground and clutter are random.

SHAPES = ("disk", "square", "triangle", "ring", "cross")
TEXTURES = ("plain", "striped")
PALETTES = {"red": ((0.9, 0.25, 0.2), (0.95, 0.8, 0.3)), "blue": ((0.2, 0.35, 0.85), (0.4, 0.85, 0.8)),
            "green": ((0.2, 0.6, 0.2), (0.75, 0.9, 0.35)), "violet": ((0.55, 0.2, 0.7), (0.9, 0.6, 0.85)),
            "grey": ((0.25, 0.25, 0.25), (0.9, 0.9, 0.9))}
DEMO_TRAIN, DEMO_TEST = 200, 40


def demo_images(side, limit=None):
    """(class names, train Split, test Split) of 50 classes, the same in every run; the first `limit` images of each class."""
    names = [f"{texture} {palette} {shape}" for shape in SHAPES for texture in TEXTURES for palette in PALETTES]
    ranks = [np.arange(count) < (limit or count) for count in (DEMO_TRAIN, DEMO_TEST)]
    labels, keep = np.repeat(np.arange(len(names)), DEMO_TRAIN + DEMO_TEST), np.tile(np.concatenate(ranks), len(names))
    images = draw_demo(labels, side, np.random.default_rng(0), keep)
    parts = np.split(images.reshape(len(names), -1, 3, side, side), [ranks[0].sum()], axis=1)
    return names, *(Split(part.reshape(-1, 3, side, side), [part.shape[1]] * len(names)) for part in parts)


def draw_demo(labels, side, rng, keep=slice(None)):
    """Render one image per label, of which only those that `keep` selects are worked out: uint8 (N, 3, side, side)."""
    n, labels = len(labels), labels[keep]
    uniform = lambda low, high, *shape: rng.uniform(low, high, (n, *shape)).astype(np.float32)[keep]  # noqa: E731
    shape, texture, palette = labels // 10, labels // 5 % 2, labels % 5
    grid = (np.arange(side, dtype=np.float32) + 0.5) / side * 2 - 1
    x, y = grid[None, None, :] - uniform(-0.25, 0.25, 1, 1), grid[None, :, None] - uniform(-0.25, 0.25, 1, 1)
    angle, scale = uniform(-0.6, 0.6, 1, 1), uniform(0.55, 0.85, 1, 1)
    u, v = (x * np.cos(angle) - y * np.sin(angle)) / scale, (x * np.sin(angle) + y * np.cos(angle)) / scale
    radius, box = np.hypot(u, v), np.maximum(abs(u), abs(v))
    outside = np.choose(shape[:, None, None], [  # below zero inside the shape
        radius - 0.95, box - 0.85, np.maximum(abs(u) * 1.7 + v, -v * 1.2) - 0.75, abs(radius - 0.7) - 0.28,
        np.maximum(np.minimum(abs(u), abs(v)) - 0.32, box - 0.95)])
    mask = np.clip(0.5 - outside * scale * side / 2, 0, 1)
    phase, freq = uniform(0, 6.3, 1, 1), uniform(5.5, 7.5, 1, 1)
    mix = (texture[:, None, None] * np.clip(np.sin(freq * u + phase) * 2 + 0.5, 0, 1))[:, None]
    pair = np.array(list(PALETTES.values()), np.float32)[palette] + uniform(-0.14, 0.14, 2, 3)
    colour = pair[:, 0, :, None, None] * (1 - mix) + pair[:, 1, :, None, None] * mix
    slope = uniform(-1, 1, 1, 1) * grid[:, None] + uniform(-1, 1, 1, 1) * grid
    # a dull ground: where its colour varied as much as the shape's, that was what Barlow Twins learnt first
    ground = uniform(0.3, 0.7, 3, 1, 1) + uniform(-0.15, 0.15, 3, 1, 1) * slope[:, None]
    for _ in range(3):  # clutter behind the shape
        centre = [axis - uniform(-1, 1, 1, 1) for axis in (grid[None, None, :], grid[None, :, None])]
        blob = np.hypot(*centre) - uniform(0.1, 0.35, 1, 1)
        ground += np.clip(0.5 - blob * side / 2, 0, 1)[:, None] * (uniform(0.1, 0.9, 3, 1, 1) - ground)
    image = ground + mask[:, None] * (colour * uniform(0.75, 1.1, 1, 1, 1) - ground)
    return (np.clip(image + rng.normal(0, 0.03, (n, *image.shape[1:]))[keep], 0, 1) * 255).round().astype(np.uint8)


# ---------------------------------------------------------------------------------------------------------------------
# Tasks.

READERS = ("oracle", "joint")  # who may look at the images of finished tasks; nme rides on the oracle's pass
CHUNK = 1024 * 32 * 32  # pixels augmented in one call: several batches of small images share the cost of the call


def class_order(num_classes, seed):
    """order[k] = original label of new label k: numpy's legacy permutation, as the authors' DataManager draws it."""
    return np.random.RandomState(seed).permutation(num_classes).tolist()


def task_sizes(num_classes, tasks, first_classes=None):
    """Classes per task: ceil(C/T) and the rest in the last one, or floor(C/T) where that would leave a task empty."""
    if first_classes is not None:
        if tasks < 2 or not 0 < first_classes < num_classes:
            raise UserError(f"--first-classes {first_classes} with {num_classes} classes in {tasks} tasks: expected 1 "
                            f"to {num_classes - 1}, and at least 2 tasks")
        return [first_classes] + task_sizes(num_classes - first_classes, tasks - 1)
    if not 1 <= tasks <= num_classes:
        raise UserError(f"{num_classes} classes cannot be split into {tasks} tasks: set --tasks to 1 to {num_classes}")
    each = -(-num_classes // tasks)
    if each * (tasks - 1) >= num_classes:
        each = num_classes // tasks
    return [each] * (tasks - 1) + [num_classes - each * (tasks - 1)]


class Task:
    """The training images of one task on the device, with new labels; augmentations are the data set's."""

    def __init__(self, dataset, index, classes, images, clean_images, labels, order):
        self.dataset, self.index, self.classes, self.order = dataset, index, classes, order
        self.images, self.clean_images, self._labels, self._hidden = images, clean_images, labels, False
        self.augment, self.clean = dataset.augment, dataset.clean
        self.two_views, self.multi_crop = dataset.two_views, dataset.multi_crop

    def __len__(self):
        return len(self.images)

    @property
    def labels(self):
        """New labels (N,) int64, unless this is a task without labels."""
        if self._hidden:
            raise RuntimeError("this task has no labels: only labelled() may read some of them")
        return self._labels

    def without_labels(self):
        """The same task whose labels cannot be read (self-supervised training); labelled() still works."""
        task = copy.copy(self)
        task._hidden = True
        return task

    def subset(self, index):
        """The same task restricted to the images of these numbers."""
        task = copy.copy(self)
        task.images, task._labels = self.images[index], self._labels[index]
        task.clean_images = task.images if self.clean_images is self.images else self.clean_images[index]
        return task

    def labelled(self, share, seed, count=None):
        """(image numbers, labels) of a labelled share of each class, at least one image, or of `count` images; nested in each other."""
        # differs: POCON draws with replacement from the whole task; this is NNCSL's balanced 4/25/125 of 500
        labels, chosen = self._labels.cpu(), []
        for label in self.classes:
            index = (labels == label).nonzero().squeeze(1)
            order = np.random.RandomState([seed, self.order[label]]).permutation(len(index))
            chosen.append(index[order[:count or max(1, round(share * len(index)))]])
        index = torch.cat(chosen).to(self.images.device)
        return index, self._labels[index]

    def epoch(self, batch_size, generator=None, augment=None, drop_last=False, with_labels=True):
        """One shuffled epoch: yields (augment(images, generator), labels), or the former alone without labels."""
        augment, device = augment or self.augment, self.images.device
        order = to_device(torch.randperm(len(self), generator=generator), device)
        if drop_last:
            order = order[:len(order) // batch_size * batch_size]
        ahead = max(1, CHUNK // (batch_size * self.images.shape[-1] ** 2))
        for index in order.split(ahead * batch_size):
            augmented = augment(self.images[index], generator)
            single = isinstance(augmented, torch.Tensor)
            parts = [view.split(batch_size) for view in ([augmented] if single else augmented)]
            for k, views in enumerate(zip(*parts)):
                views = views[0] if single else views
                yield (views, self.labels[index[k * batch_size:(k + 1) * batch_size]]) if with_labels else views


def merge_tasks(tasks):
    """Several tasks as one, for joint training; it has the index of the last."""
    first, last = tasks[0], tasks[-1]
    images, clean_images = (torch.cat([getattr(task, part) for task in tasks]) for part in ("images", "clean_images"))
    if last.clean_images is last.images:
        clean_images = images
    labels, classes = torch.cat([task.labels for task in tasks]), range(first.classes.start, last.classes.stop)
    return Task(last.dataset, last.index, classes, images, clean_images, labels, last.order)


class TaskStream:
    """Deals the classes of a data set out as tasks; training images of finished tasks stay behind one named door."""

    def __init__(self, dataset, *, tasks=10, first_classes=None, seed=0, device="cpu"):
        self.dataset, self.device, self.num_tasks = dataset, torch.device(device), tasks
        self.sizes = task_sizes(dataset.num_classes, tasks, first_classes)
        self.class_order = class_order(dataset.num_classes, seed)
        self.class_names = [dataset.class_names[c] for c in self.class_order]
        self.opened = dict.fromkeys(READERS, 0)
        self._current, self._tests = None, {}

    def _gather(self, t, images_of):
        """The images of task t by one of the data set's readers, on the device, and their new labels."""
        start = sum(self.sizes[:t])
        classes = range(start, start + self.sizes[t])
        parts = [images_of(self.class_order[label]) for label in classes]
        labels = torch.repeat_interleave(torch.tensor(classes), torch.tensor([len(part) for part in parts]))
        return torch.cat(parts).to(self.device), labels.to(self.device), classes

    def _make(self, t):
        images, labels, classes = self._gather(t, self.dataset.train_images)
        clean = images
        if self.dataset.train_clean_images != self.dataset.train_images:
            clean = self._gather(t, self.dataset.train_clean_images)[0]
        return Task(self.dataset, t, classes, images, clean, labels, self.class_order)

    def task(self, t):
        """Task t, the current one from now on; an earlier task is never handed out again."""
        if self._current and t < self._current.index:
            raise RuntimeError(f"task {t} is finished (task {self._current.index} is current): its images are gone")
        if not self._current or t > self._current.index:
            self._current = None  # let go of the old images before the new ones are loaded
            self._current = self._make(t)
        return self._current

    def reopen_finished_tasks(self, up_to, reader):
        """The one door to old training images: tasks 0..up_to for a reader of READERS, counted in `opened`."""
        if reader not in READERS:
            raise RuntimeError(f"{reader!r} may not read finished tasks; only {', '.join(READERS)} may")
        self.opened[reader] += 1
        return (self._make(t) for t in range(up_to + 1))

    def test(self, t):
        """(uint8 test images, new labels) of tasks 0..t, task by task; they stay on the device."""
        for s in range(t + 1):
            if s not in self._tests:
                self._tests[s] = self._gather(s, self.dataset.test_images)[:2]
            yield self._tests[s]


# ---------------------------------------------------------------------------------------------------------------------
# Look at your data.


def torchvision_pipeline(dataset, pipeline):
    """The same steps by torchvision on Pillow images, one transform per view; None where it has not the same steps."""
    from torchvision import transforms as T
    spec, size = dataset.spec, dataset.image_size
    flip, end = T.RandomHorizontalFlip(), [T.ToTensor(), T.Normalize(dataset.mean, dataset.std)]
    if pipeline == "clean":
        return [T.Compose([T.CenterCrop(size), *end])]
    if pipeline == "augment":
        start = T.RandomResizedCrop(size) if spec.pad is None else T.RandomCrop(size, spec.pad)
        policy = T.AutoAugment(T.AutoAugmentPolicy.CIFAR10, fill=FILL)
        return [T.Compose([start, flip, *([T.ColorJitter(63 / 255), policy] if spec.autoaugment else []), *end])]
    views = view_recipes(pipeline, size)
    if any(view.blur or view.equalise for view in views):
        return None
    modes = T.InterpolationMode.BILINEAR, T.InterpolationMode.BICUBIC
    return [T.Compose([
        T.RandomResizedCrop(view.size, view.area, interpolation=modes[view.cubic]),
        T.RandomApply([T.ColorJitter(*view.jitter)], 0.8), T.RandomGrayscale(view.gray),
        *([T.RandomSolarize(128, view.solarise)] if view.solarise else []), flip, *end]) for view in views]


def rate(work, count, seconds=2.0):
    """Images per second of work(), which handles `count` images: the best of several calls after a first one."""
    work()
    times, stop = [], time.perf_counter() + seconds
    while not times or time.perf_counter() < stop:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return count / min(times)


def contact_sheet(path, originals, views, dataset):
    """Save a picture: in each column an original and below it its augmented forms, un-normalised."""
    from PIL import Image
    size = max(view.shape[-1] for view in views)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (dataset.mean, dataset.std))
    rows = [(view * std + mean).mul(255).round().clamp(0, 255).to(torch.uint8) for view in views]
    rows = [centre_crop(originals, size), *rows]
    rows = [F.pad(row, (1, size + 1 - row.shape[-1], 1, size + 1 - row.shape[-1]), value=255) for row in rows]
    sheet = torch.cat([torch.cat(list(row), 2) for row in rows], 1).permute(1, 2, 0)
    sheet = sheet.repeat_interleave(max(1, 96 // size), 0).repeat_interleave(max(1, 96 // size), 1)
    Image.fromarray(sheet.numpy()).save(path)


def look(args):
    """Counts, channel means, the speed of every pipeline beside torchvision's, and a contact sheet of each."""
    from PIL import Image
    start = time.perf_counter()
    dataset = load(args.dataset, args.data_dir, image_size=args.image_size, class_list=args.class_list)
    total, count = 0, sum(dataset.train_counts)
    opened = time.perf_counter() - start
    for c in range(dataset.num_classes):
        total = total + dataset.train_images(c).to(torch.float32).mean((2, 3)).sum(0)
    read = time.perf_counter() - start - opened
    print(f"{dataset.name}: {dataset.num_classes} classes (md5 of their names {dataset.class_list_md5}), {count:,} training "
          f"and {sum(dataset.test_counts):,} test images of {dataset.image_size} pixels")
    print(f"channel means {' '.join(f'{m:.4f}' for m in total / count / 255)}; opened in {opened:.2f} s, "
          f"all training images read in {read:.2f} s")

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    n = max(16, CHUNK // dataset.train_images(0).shape[-1] ** 2)
    classes = range(0, dataset.num_classes, -(-dataset.num_classes // n))
    images, clean = (torch.cat([of(c)[:-(-n // len(classes))] for c in classes])[:n]
                     for of in (dataset.train_images, dataset.train_clean_images))
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images[:256]]
    shown = torch.arange(0, len(images), -(-len(images) // 12))
    pipelines = {
        "clean": lambda x: [dataset.clean(x)], "augment": lambda x: [dataset.augment(x, generator)],
        "asymmetric": lambda x: dataset.two_views(x, generator), "multi": lambda x: dataset.multi_crop(x, generator),
        "symmetric": lambda x: dataset.two_views(x, generator, "symmetric")}
    for name, pipeline in pipelines.items():
        source = clean if name == "clean" else images
        ours, theirs = rate(lambda: pipeline(source), len(source)), torchvision_pipeline(dataset, name)
        line = f"{name:12s}{ours:10,.0f} images/s"
        if theirs:
            reference = rate(lambda: [step(picture) for picture in pictures for step in theirs], len(pictures))
            line += f", torchvision {reference:8,.0f}, ratio {ours / reference:.1f}"
        path = Path(args.out, f"{dataset.name}-{name}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        repeats = {"clean": 1, "augment": 4}.get(name, 2)
        contact_sheet(path, source[shown], [view for _ in range(repeats) for view in pipeline(source[shown])], dataset)
        print(f"{line}; {path}", flush=True)


def main(argv=None):
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=look.__doc__, allow_abbrev=False)
    parser.add_argument("--dataset", choices=DATASETS, default="demo")
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--image-size", type=int, help="resolution of --dataset folder")
    parser.add_argument("--class-list", help="file of class folder names, one per line (imagenet100, folder)")
    parser.add_argument("--out", default="sheets", help="folder for the contact sheets")
    try:
        look(parser.parse_args(argv))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
