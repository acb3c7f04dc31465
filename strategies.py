"""A backbone learns one task: backbones, heads, losses, and one small class per strategy.

A strategy has `learn(task)` and `snapshot()`, the frozen feature extractor f_t that everything post hoc reads
(prototypes, drift compensation, evaluation). Strategies with a classifier of their own also have `predict(images)`.
To add one: write a class, enter it in STRATEGIES, give it its settings in PRESETS.
"""
import contextlib
import copy
import http.client
import json
import math
import os
import random
import re
import sys
import time
import urllib.request
import zipfile
import zlib
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from data import Progress, UserError, rotate4

# ------------------------------------------------------------------------------------------------------------------
# Settings: every value with its source. P paper, S its supplement, ldc the authors' code, pycil,
# fecam, efc, slca those of the rivals; a flag overrides any of them.

SETTINGS = {  # name -> help text of the flag
    "backbone": "resnet18 (the paper's), or any torchvision classification model by name",
    "stem": "first layer of resnet18: cifar, imagenet (3x3 and max-pool, the authors'), standard (7x7, half the resolution)",
    "width": "channels of resnet18's first stage; features have 8 times as many",
    "batch_size": "images per step",
    "first_epochs": "epochs on the first task",
    "epochs": "epochs on every later task",
    "first_lr": "learning rate on the first task",
    "lr": "learning rate on every later task",
    "momentum": "SGD momentum",
    "first_weight_decay": "weight decay on the first task",
    "weight_decay": "weight decay on every later task",
    "first_milestones": "epochs after which the first task's learning rate falls tenfold",
    "milestones": "the same for every later task",
    "lambda_kd": "weight of LwF's distillation term",
    "temperature": "softmax temperature of LwF's distillation term, and of PASS's logits",
    "weights": "pre-trained weights of the backbone: none, in21k (vit_b_16), torchvision (its ImageNet-1k ones), or a file",
    "final_norm": "last LayerNorm of a pre-trained vit: fresh (as SLCA has it) or pretrained",
    "head": "classifier that trains the backbone: cosine (the authors') or linear (SLCA's)",
    "head_lr_factor": "the head's learning rate over the backbone's",
    "head_epochs": "epochs of FeTrIL's linear classifier, on cached features",
    "head_lr": "learning rate of FeTrIL's linear classifier, annealed to zero by a cosine",
    "head_weight_decay": "weight decay of FeTrIL's linear classifier",
    "tukey": "exponent that FeCAM applies to features; needs features that are never negative, 1 leaves them alone",
    "shrinkage": "FeCAM's pull of each covariance towards its mean variance and its mean covariance, applied twice",
    "lambda_fkd": "weight of PASS's feature distillation",
    "lambda_proto": "weight of PASS's cross-entropy on noisy prototypes",
    "lambda_efm": "weight of EFC's pull along the directions that its classifiers depend on",
    "eta_efm": "weight of EFC's pull along all directions",
    "efc_sigma": "width of EFC's kernel for the drift of its prototypes",
    "first_optimizer": "optimiser of EFC's first task: adam or sgd",
}

BACKBONE = dict(backbone="resnet18", stem="cifar", width=64, weights="none", final_norm="fresh")
FIRST = dict(  # the first task of LwF, FeTrIL and FeCAM: P "Training procedure", S "LwF"; ldc models/lwf.py
    BACKBONE, head="cosine", head_lr_factor=1.0, batch_size=128, momentum=0.9,
    first_epochs=200, first_lr=0.1, first_weight_decay=5e-4,
    first_milestones=(60, 120, 160),  # differs: S says 180; P and ldc say 160
)
FIRST_TASK = "sgd", tuple(FIRST)
STEM_BY_DATASET = {
    "imagenet100": dict(stem="imagenet"),  # ldc convs/resnet.py; four times the work of the standard stem
    "cars": dict(stem="standard"),
}
SGD = dict(FIRST, epochs=100, lr=0.05, milestones=(45, 90),
           weight_decay=2e-4)  # ldc only; the paper is silent after task 1
SGD_BY_DATASET = {**STEM_BY_DATASET, "tinyimagenet": dict(lr=0.001)}  # S
SLCA_CARS = dict(  # Table 2: "same settings and hyperparameters as SLCA"; slca slca_cars config and its stage 1
    backbone="vit_b_16", weights="in21k", final_norm="fresh", head="linear", batch_size=128, momentum=0.9,
    first_epochs=50, epochs=50, first_milestones=(40,), milestones=(40,), first_weight_decay=5e-4, weight_decay=5e-4,
    first_lr=1e-4, lr=1e-4, head_lr_factor=100.0,  # slca bcb_lrscale 1/100: head .01, backbone 1e-4
)
PASS_SETTINGS = dict(  # pycil exps/pass.json; S gives the two lambdas
    BACKBONE, batch_size=64, first_epochs=101, epochs=101, lr=1e-3, weight_decay=2e-4,
    first_milestones=(45, 90), milestones=(45, 90),  # StepLR 45
    temperature=0.1, lambda_fkd=10.0, lambda_proto=10.0,
)
EFC_SETTINGS = dict(  # efc scripts/experiments_efc.sh and its defaults
    BACKBONE, batch_size=64, first_optimizer="adam", first_epochs=100, first_lr=1e-3, first_weight_decay=2e-4,
    first_milestones=(45, 90), momentum=0.9, epochs=100, lr=1e-4, head_lr_factor=1.0, weight_decay=2e-4,
    lambda_efm=10.0, eta_efm=0.1, efc_sigma=0.2,
)
LWF = dict(SGD, lambda_kd=10.0, temperature=2.0)  # P, S
PRESETS = {  # strategy -> data set -> settings; "*" holds what all data sets share
    "finetune": {"*": SGD, **SGD_BY_DATASET, "cars": SLCA_CARS},
    "lwf": {"*": LWF, **SGD_BY_DATASET, "imagenet100": dict(stem="imagenet", lambda_kd=5.0)},  # S: lambda 5
    "joint": {"*": SGD, **SGD_BY_DATASET},
    # differs: the official PASS trains ImageNet100 with SGD first and without a temperature; the paper cites PyCIL's PASS
    "pass": {"*": PASS_SETTINGS, **STEM_BY_DATASET},
    # pycil exps/fetril.json, S "same as PyCIL"
    "fetril": {"*": dict(FIRST, head_epochs=50, head_lr=0.05, head_weight_decay=5e-4), **STEM_BY_DATASET},
    "fecam": {"*": dict(FIRST, tukey=0.5, shrinkage=(1.0, 1.0)), **STEM_BY_DATASET},  # S
    "efc": {"*": EFC_SETTINGS, **STEM_BY_DATASET, "imagenet100": dict(  # efc: the standard stem, SGD first, heads at 1e-4
        stem="standard", first_optimizer="sgd", first_lr=0.1, first_weight_decay=5e-4, first_epochs=160,
        first_milestones=(80, 120, 150), lr=1e-5, head_lr_factor=10.0)},
}

SCALES = {  # one rule for every strategy: epochs, milestones and warm-ups shrink by a factor, width and batch are capped
    "paper": dict(first_epochs=1.0, epochs=1.0, width=64, batch_size=1024, limit=None),
    "small": dict(first_epochs=0.25, epochs=0.15, width=16, batch_size=1024, limit=None),
    "demo": dict(first_epochs=0.1, epochs=0.08, width=8, batch_size=32, limit=None),
    "smoke": dict(first_epochs=0.01, epochs=0.01, width=8, batch_size=32, limit=20),  # images per class
}


def resolve_settings(strategy, dataset, scale, overrides):
    """Preset for (strategy, data set), shrunk to the scale, then the user's flags: flag > preset > default."""
    rule, settings = SCALES[scale], {**PRESETS[strategy]["*"], **PRESETS[strategy].get(dataset, {})}
    for name, value in settings.items():
        factor = rule["first_epochs" if name.startswith("first_") else "epochs"]
        if name.endswith("epochs"):
            settings[name] = max(1, round(value * factor))
        elif name.endswith("milestones"):
            settings[name] = tuple(max(1, round(m * factor)) for m in value)
        elif name in ("width", "batch_size"):
            settings[name] = min(value, rule[name])
    unknown = [name for name in overrides if name not in settings]
    if unknown:
        raise UserError(f"strategy {strategy} has no setting --{unknown[0].replace('_', '-')}; "
                        f"it has {', '.join('--' + n.replace('_', '-') for n in settings)}.")
    return {**settings, **overrides}


# ------------------------------------------------------------------------------------------------------------------
# Backbones

STEMS = {  # kernel, stride, padding, max-pool
    "cifar": (3, 1, 1, False),  # CIFAR-100 and Tiny-ImageNet
    "imagenet": (3, 1, 1, True),  # the authors' ImageNet100 stem: layer 1 runs at half the image size
    "standard": (7, 2, 3, True),  # torchvision's
}


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut; ends in ReLU, so features are never negative."""

    def __init__(self, channels_in, channels, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride, bias=False),
                                          nn.BatchNorm2d(channels))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x), inplace=True)


class ResNet18(nn.Module):
    """ResNet-18 without its classifier: images (B, 3, H, W) -> features (B, 8 * width)."""

    def __init__(self, width=64, stem="cifar"):
        super().__init__()
        kernel, stride, padding, pool = STEMS[stem]
        self.conv1 = nn.Conv2d(3, width, kernel, stride, padding, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(3, 2, 1) if pool else nn.Identity()
        stages, channels_in = [], width
        for stage in range(4):
            channels = width * 2 ** stage
            stages += [BasicBlock(channels_in, channels, 1 if stage == 0 else 2), BasicBlock(channels, channels, 1)]
            channels_in = channels
        self.blocks = nn.Sequential(*stages)
        self.dim = channels_in
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        x = self.pool(F.relu(self.bn1(self.conv1(x)), inplace=True))
        return self.blocks(x).mean((2, 3))


def torchvision_backbone(name, image_size):
    """Any torchvision classifier by name, its last linear layer replaced by the identity, so that it returns features."""
    import torchvision.models as models
    if name not in models.list_models(module=models):
        raise UserError(f"--backbone {name} is not a torchvision classification model; expected resnet18, "
                        f"or a name such as {', '.join(models.list_models(module=models)[:40:8])}.")
    model = models.get_model(name, weights=None, **({"image_size": image_size} if name.startswith("vit") else {}))
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    if not linear:
        raise UserError(f"--backbone {name} has no linear classifier to take off; choose another backbone.")
    parent, _, leaf = linear[-1].rpartition(".")
    setattr(model.get_submodule(parent), leaf, nn.Identity())
    model.eval()
    with torch.no_grad():
        features = model(torch.zeros(2, 3, image_size, image_size))
    if not (torch.is_tensor(features) and features.ndim == 2):
        raise UserError(f"--backbone {name} does not return one feature vector per image; choose another backbone.")
    model.dim = features.shape[1]
    return model


def build_backbone(settings, image_size):
    """The backbone the settings name, with its feature width in `.dim`."""
    if settings.backbone == "resnet18":
        if settings.stem not in STEMS:
            raise UserError(f"--stem {settings.stem} is unknown; expected one of {', '.join(STEMS)}.")
        return ResNet18(settings.width, settings.stem)
    backbone = torchvision_backbone(settings.backbone, image_size)
    if settings.weights != "none" and settings.final_norm == "fresh" and hasattr(backbone, "encoder"):
        fresh_norm(backbone)  # now, not with the weights: a checkpoint does not hold its eps
    return backbone


# ------------------------------------------------------------------------------------------------------------------
# Pre-trained weights

WEIGHTS = {  # what SLCA loads: augreg's ViT-B/16, not the original release of the same name
    "in21k": "https://storage.googleapis.com/vit_models/augreg/B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0.npz",
}
BLOCK = "encoder.layers.encoder_layer_{}."
VIT_LAYOUTS = {  # layout -> (a name that gives it away, prefix of block i, its modules -> torchvision's, modules to drop)
    "JAX": ("embedding/kernel", r"Transformer/encoderblock_(\d+)/", {
        "cls": "class_token", "Transformer/posembed_input/pos_embedding": "encoder.pos_embedding", "embedding": "conv_proj",
        "Transformer/encoder_norm": "encoder.ln", "LayerNorm_0": "ln_1", "LayerNorm_2": "ln_2",
        "MultiHeadDotProductAttention_1/query": "query", "MultiHeadDotProductAttention_1/key": "key",
        "MultiHeadDotProductAttention_1/value": "value", "MultiHeadDotProductAttention_1/out": "self_attention.out_proj",
        "MlpBlock_3/Dense_0": "mlp.0", "MlpBlock_3/Dense_1": "mlp.3"}, ("head", "pre_logits")),
    "timm": ("patch_embed.proj.weight", r"blocks\.(\d+)\.", {
        "cls_token": "class_token", "pos_embed": "encoder.pos_embedding", "patch_embed.proj": "conv_proj",
        "norm": "encoder.ln", "norm1": "ln_1", "norm2": "ln_2", "attn.qkv": "self_attention.in_proj",
        "attn.proj": "self_attention.out_proj", "mlp.fc1": "mlp.0", "mlp.fc2": "mlp.3"}, ("head", "head_dist", "pre_logits", "fc_norm")),
    "Hugging Face": ("embeddings.patch_embeddings.projection.weight", r"encoder\.layer\.(\d+)\.", {
        "embeddings.cls_token": "class_token", "embeddings.position_embeddings": "encoder.pos_embedding",
        "embeddings.patch_embeddings.projection": "conv_proj", "layernorm": "encoder.ln", "layernorm_before": "ln_1",
        "layernorm_after": "ln_2", "attention.attention.query": "query", "attention.attention.key": "key",
        "attention.attention.value": "value", "attention.output.dense": "self_attention.out_proj",
        "intermediate.dense": "mlp.0", "output.dense": "mlp.3"}, ("pooler", "classifier")),
}
LEAVES = {"kernel": "weight", "scale": "weight", "weight": "weight", "bias": "bias"}


def find_weights(settings, data_dir):
    """The file of pre-trained weights that the settings name, downloaded to <data-dir>/weights if absent; None for none."""
    s = settings
    if s.final_norm not in ("fresh", "pretrained"):
        raise UserError(f"--final-norm {s.final_norm} is unknown; expected fresh or pretrained.")
    if s.weights == "none":
        return None
    if s.backbone == "resnet18" or (s.weights == "in21k" and s.backbone != "vit_b_16"):
        raise UserError(f"there are no --weights {s.weights} for --backbone {s.backbone}; use --weights none, or "
                        "--backbone vit_b_16.")
    if s.weights in WEIGHTS:
        url = WEIGHTS[s.weights]
    elif s.weights == "torchvision":  # a labelled stand-in: ImageNet-1k, not 21k
        import torchvision.models as models
        url = models.get_model_weights(s.backbone).DEFAULT.url
    elif Path(s.weights).is_file():
        return Path(s.weights)
    else:
        raise UserError(f"--weights {s.weights} is not a file; expected one, or none, {', '.join(WEIGHTS)}, torchvision.")
    target = Path(data_dir, "weights", url.rpartition("/")[2])
    return target if target.exists() else download(url, target)


def download(url, target):
    """Fetch a file under a temporary name and rename it when it is complete; UserError with the way by hand."""
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
        raise UserError(f"cannot download {url} ({getattr(error, 'reason', error)}): fetch it by hand and put it at "
                        f"{target}, or name another file with --weights.") from None
    return target


def read_safetensors(path):
    """The tensors of a .safetensors file by name: 8 bytes header length, JSON header, raw little-endian data."""
    raw = np.memmap(path, np.uint8, "r")
    start = 8 + int.from_bytes(raw[:8].tobytes(), "little")
    kinds = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}
    return {name: torch.from_numpy(raw[start + entry["data_offsets"][0]:start + entry["data_offsets"][1]].copy())
            .view(kinds[entry["dtype"]]).reshape(entry["shape"])
            for name, entry in json.loads(raw[8:start].tobytes()).items() if name != "__metadata__"}


def read_weights(path):
    """The tensors of a .npz, .pth, .bin or .safetensors file by name; its kind is told by its content."""
    try:
        if zipfile.is_zipfile(path) and any(name.endswith(".npy") for name in zipfile.ZipFile(path).namelist()):
            with np.load(path) as arrays:
                return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        with open(path, "rb") as file:
            torch_file = file.read(1) == b"\x80" or zipfile.is_zipfile(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True) if torch_file else read_safetensors(path)
    except Exception as error:  # each reader raises kinds of its own
        raise UserError(f"cannot read the weights {path} ({type(error).__name__}: {error}): expected a complete .npz, "
                        ".pth, .bin or .safetensors file.") from None
    tensors = next((tensors[key] for key in ("model", "state_dict") if isinstance(tensors.get(key), dict)), tensors)
    return {name.removeprefix("module."): tensor for name, tensor in tensors.items()}


def translate(name, tensor, blocks, modules):
    """One tensor of another layout -> (torchvision's name, or None where there is none; the tensor in torch's axes)."""
    block = re.match(blocks, name)
    inner = name[block.end():] if block else name
    module, _, leaf = inner.replace("/", ".").rpartition(".")
    module, leaf = (inner, None) if inner in modules else (inner[:len(module)], leaf)
    target = modules.get(module)
    if target is None or (leaf and leaf not in LEAVES):
        return None, tensor
    if leaf == "kernel":  # JAX: (in, out), (in, heads, out), (heads, in, out), (height, width, in, out)
        if tensor.ndim == 4:
            tensor = tensor.permute(3, 2, 0, 1)
        else:
            tensor = tensor.flatten(1).T if target in ("query", "key", "value") else tensor.flatten(0, -2).T
    elif leaf:
        tensor = tensor.reshape(-1) if leaf == "bias" else tensor
    if leaf:
        target += ("_" if target.endswith("in_proj") else ".") + LEAVES[leaf]
    return (BLOCK.format(block[1]) if block else "") + target, tensor


def vit_state(tensors, path):
    """Another layout's ViT -> (its name, torchvision's names and axes, names dropped, names not understood)."""
    for prefix in ("opt/target/", "params/", "vit."):
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    if any("MultiHeadDotProductAttention_0" in name for name in tensors):
        raise UserError(f"{path} has the layout of newer big_vision dumps, which is not supported; use {WEIGHTS['in21k']}.")
    layout = next((layout for layout, (known, *_) in VIT_LAYOUTS.items() if known in tensors), None)
    if layout is None:
        raise UserError(f"{path} holds no vision transformer in a known layout ({', '.join(VIT_LAYOUTS)}, torchvision); "
                        f"its first name is {next(iter(tensors), 'missing')}.")
    _, blocks, modules, drop = VIT_LAYOUTS[layout]
    state, dropped, unknown = {}, [], []
    for name, tensor in tensors.items():
        if re.split(r"[./]", name)[0] in drop:
            dropped.append(name)
            continue
        target, tensor = translate(name, tensor, blocks, modules)
        if target is None:
            unknown.append(name)
        state[target or name] = tensor
    for name in [name for name in state if ".query." in name]:  # torchvision stacks q, k and v
        stem, leaf = name.split("query.")
        parts = [state.pop(f"{stem}{part}.{leaf}", None) for part in ("query", "key", "value")]
        if all(part is not None for part in parts):
            state[f"{stem}self_attention.in_proj_{leaf}"] = torch.cat(parts)
    return layout, state, dropped, unknown


def fresh_norm(model):
    """SLCA replaces a ViT's final LayerNorm by a new one with torch's own eps; features then have norm sqrt(d)."""
    model.encoder.ln = nn.LayerNorm(model.encoder.ln.normalized_shape).to(model.encoder.ln.weight)


def load_vit_weights(model, path, final_norm="fresh"):
    """Load a file of pre-trained weights into a torchvision model without classifier; every tensor must be there and fit.

    Names of Google's JAX release (.npz), timm, Hugging Face or torchvision itself, of any depth, width and patch size.
    """
    tensors, want = read_weights(path), model.state_dict()
    if set(want) <= set(tensors):
        layout, dropped, unknown = "torchvision", [name for name in tensors if name not in want], []
        state = {name: tensors[name] for name in want}
    else:
        layout, state, dropped, unknown = vit_state(tensors, path)
    for problem, names in (("does not know", unknown), ("has no", sorted(set(state) - set(want))),
                           ("also needs", sorted(set(want) - set(state)))):
        if names:
            raise UserError(f"{path} ({layout} layout) does not fit the backbone: it {problem} {names[0]}"
                            f"{f' and {len(names) - 1} more' if names[1:] else ''}.")
    for name, tensor in state.items():
        if tensor.shape != want[name].shape:
            raise UserError(f"{path} ({layout} layout) does not fit the backbone: {name} is {tuple(tensor.shape)}, "
                            f"expected {tuple(want[name].shape)}.")
    state = {name: tensor.float().contiguous() for name, tensor in state.items()}
    check = 0
    for name in sorted(state):
        check = zlib.crc32(state[name].numpy(), check)
    print(f"{path}: {layout} layout, {len(state)} tensors, checksum {check:08x}; not used: {', '.join(dropped) or 'none'}",
          file=sys.stderr)
    model.load_state_dict(state, strict=True)
    if final_norm == "fresh" and hasattr(model, "encoder"):
        fresh_norm(model)


# ------------------------------------------------------------------------------------------------------------------
# Heads and losses

class CosineHead(nn.Module):
    """Logits sigma * cos(f, w_c) with one learnable sigma; grows by rows and keeps what it has learnt (ldc)."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, dim))
        self.sigma = nn.Parameter(torch.ones(1))

    def grow(self, classes):
        """Append fresh rows until there are `classes` of them."""
        dim, bound = self.weight.shape[1], 1 / math.sqrt(self.weight.shape[1])
        fresh = torch.empty(classes - len(self.weight), dim).uniform_(-bound, bound)
        self.weight = nn.Parameter(torch.cat([self.weight.detach(), fresh.to(self.weight)]))

    def forward(self, feats):
        return self.sigma * F.linear(F.normalize(feats, dim=1), F.normalize(self.weight, dim=1))


class LinearHead(nn.Module):
    """Logits W f + b; grows by rows that `init` fills in place, and keeps what it has learnt."""

    def __init__(self, dim, init, bias=True):
        super().__init__()
        self.init, self.weight = init, nn.Parameter(torch.empty(0, dim))
        self.bias = nn.Parameter(torch.empty(0)) if bias else None

    def grow(self, rows):
        """Append fresh rows, with zero bias, until there are `rows` of them."""
        fresh = torch.empty(rows - len(self.weight), self.weight.shape[1])
        self.init(fresh)
        self.weight = nn.Parameter(torch.cat([self.weight.detach(), fresh.to(self.weight)]))
        if self.bias is not None:
            self.bias = nn.Parameter(F.pad(self.bias.detach(), (0, len(fresh))))

    def forward(self, feats):
        return F.linear(feats, self.weight, self.bias)


def uniform_rows(scale):
    """Rows drawn from U(-b, b), b = scale / sqrt(d): 1 is nn.Linear's default, sqrt(3) PyCIL's Kaiming initialisation."""
    return lambda weight: weight.uniform_(-scale / math.sqrt(weight.shape[1]), scale / math.sqrt(weight.shape[1]))


HEADS = {"cosine": CosineHead, "linear": lambda dim: LinearHead(dim, lambda w: nn.init.trunc_normal_(w, std=0.02))}  # slca


def lwf_loss(logits, old_logits, labels, lambda_kd=10.0, temperature=2.0):
    """LwF: cross-entropy on the new classes' logits plus distillation of all old ones (paper section 3.3).

    logits: (B, C_old + C_new); old_logits: (B, C_old) of the frozen network; labels: (B,) in [C_old, C_old + C_new).
    """
    known = old_logits.shape[1]
    # differs: the paper writes cross-entropy over all classes; the authors' code, and we, over the new ones only
    ce = F.cross_entropy(logits[:, known:], labels - known)
    # no factor T^2: with it, lambda = 10 would act as 40
    kd = -(F.softmax(old_logits / temperature, 1) * F.log_softmax(logits[:, :known] / temperature, 1)).sum(1).mean()
    return ce + lambda_kd * kd


def by_class(feats, labels, classes):
    """Features (N, d) and labels (N,) -> one (n_c, d) per class."""
    return [feats[labels == c] for c in classes]


def covariance(feats):
    """Unbiased covariance of one class, (n, d) -> (d, d), float64 on the CPU: MPS has no float64."""
    centred = feats.cpu().double() - feats.cpu().double().mean(0)
    return centred.T @ centred / max(1, len(feats) - 1)


def pass_loss(head, feats, labels, feats_old=None, drawn=None, drawn_labels=None, *, temperature=0.1, lambda_fkd=10.0,
              lambda_proto=10.0):
    """PASS: cross-entropy on rotated classes, feature distillation, noisy prototypes (pycil models/pa2s.py).

    feats, feats_old: (4B, d) of rotate4's images; labels: (B,); drawn: (n, d) noisy prototypes of classes drawn_labels (n,).
    """
    rotated = (4 * labels[:, None] + torch.arange(4, device=labels.device)).flatten()
    loss = F.cross_entropy(head(feats) / temperature, rotated)
    if feats_old is None:
        return loss
    # a norm over the whole batch, not a mean square: its gradient has length one, however far features drift
    distance = (feats - feats_old).square().sum().clamp(min=1e-12).sqrt()  # clamped: at zero the gradient is not a number
    return loss + lambda_fkd * distance + lambda_proto * F.cross_entropy(head(drawn) / temperature, 4 * drawn_labels)


def fetril_features(feats, labels, classes, old_means):
    """FeTrIL: new features, then for each old class those of the most similar new class, moved onto its mean (pycil).

    feats (N, d), labels (N,) of the new `classes`, old_means (C_old, d) -> features (N', d), labels (N',).
    """
    groups = by_class(feats, labels, classes)
    means = torch.stack([group.mean(0) for group in groups])
    nearest = (F.normalize(old_means, dim=1) @ F.normalize(means, dim=1).T).argmax(1).tolist()
    pseudo = [groups[k] - means[k] + mean for k, mean in zip(nearest, old_means)]
    owners = [labels.new_full((len(part),), c) for c, part in enumerate(pseudo)]
    return torch.cat([feats, *pseudo]), torch.cat([labels, *owners])


def shrink_covariance(cov, alpha1=1.0, alpha2=1.0):
    """FeCAM: (d, d) plus alpha1 times its mean variance on the diagonal, alpha2 times its mean non-zero covariance off it."""
    eye = torch.eye(len(cov), dtype=cov.dtype)
    beside = cov * (1 - eye)
    mean = beside.sum() / beside.count_nonzero().clamp(min=1)
    return cov + alpha1 * cov.diagonal().mean() * eye + alpha2 * mean * (1 - eye)


def fecam_inverse(feats, tukey=0.5, shrinkage=(1.0, 1.0)):
    """FeCAM's metric of one class: raw features (n, d) -> inverse of the shrunk correlation matrix of feats^tukey, (d, d)."""
    cov = covariance(feats ** tukey)
    for _ in range(2):  # fecam shrinks twice, on purpose; once with (3, 3) differs where ReLU units are dead
        cov = shrink_covariance(cov, *shrinkage)
    std = cov.diagonal().sqrt()
    return torch.linalg.pinv(cov / std[:, None] / std, hermitian=True).to(feats)


def fecam_distance(feats, means, inverses, tukey=0.5):
    """FeCAM: squared Mahalanobis distance of n(x^tukey) to n(mean^tukey); (N, d), (C, d), (C, d, d) -> (N, C)."""
    x, means = F.normalize(feats ** tukey, dim=1), F.normalize(means ** tukey, dim=1)
    return torch.stack([((x - mean) @ inverse * (x - mean)).sum(1) for mean, inverse in zip(means, inverses)], 1)


def feature_matrix(feats, weight, batch_size):
    """EFC's empirical feature matrix E, mean of W^T (diag(p) - p p^T) W: feats (N, d), weight W (C, d) -> (d, d).

    p is the softmax over all heads; the closed form of the mean of sum_c p_c g_c g_c^T, g_c the gradient of log p_c by f.
    """
    whole = len(feats) // batch_size * batch_size or len(feats)  # efc counts full batches only
    p = F.softmax(feats[:whole] @ weight.T, 1)
    return weight.T @ (p.mean(0).diag() - p.T @ p / whole) @ weight


def efm_loss(feats, feats_old, E, lambda_efm=10.0, eta_efm=0.1):
    """EFC's regulariser: mean of (f - f_old)^T (lambda E + eta I) (f - f_old); (B, d), (B, d), (d, d)."""
    delta = feats - feats_old
    return (lambda_efm * (delta @ E * delta).sum(1) + eta_efm * delta.square().sum(1)).mean()


def efc_loss(head, feats, feats_old, labels, drawn, drawn_labels, E, known, lambda_efm=10.0, eta_efm=0.1):
    """EFC after the first task: new head on the batch, PR-ACE over all heads on prototypes and older images, regulariser.

    feats (B + m, d), labels (B + m,): the batch, then m images of the batch before; feats_old (B, d); drawn (n, d).
    """
    batch = len(feats_old)
    new = F.cross_entropy(head(feats[:batch])[:, known:], labels[:batch] - known)
    every = F.cross_entropy(head(torch.cat([drawn, feats[batch:]])), torch.cat([drawn_labels, labels[batch:]]))
    return new + every + efm_loss(feats[:batch], feats_old, E, lambda_efm, eta_efm)


def efc_drift(prototypes, feats_old, feats_new, E, sigma=0.2):
    """EFC: each prototype (C, d) moves by the mean drift of the images (N, d) near it in the metric E (d, d) -> (C, d)."""
    near = -torch.stack([((feats_old - p) @ E * (feats_old - p)).sum(1) for p in prototypes])
    # differs: a plain Gaussian kernel would be the natural reading; efc first scales all of near to [0, 1] at once
    near = (near - near.min()) / (near.max() - near.min()).clamp(min=1e-12)
    weight = torch.exp(near / (2 * sigma ** 2))
    return prototypes + weight @ (feats_new - feats_old) / weight.sum(1, keepdim=True)


def efc_rotations(labels, classes):
    """EFC's labels of rotate4's images: y, then classes + 3y + 0, 1, 2 for the quarter turns; (B,) -> (4B,)."""
    turned = classes + 3 * labels[:, None] + torch.arange(3, device=labels.device)
    return torch.cat([labels[:, None], turned], 1).flatten()


def efc_shares(known, seen, batch_size, rng):
    """EFC's sizes of the PR-ACE batch: (prototypes of old classes, images of the new ones), from a list of class ids."""
    ids = rng.sample(range(seen), seen)  # every id once, and some again where there are fewer than batch_size
    ids = (ids + ids)[:batch_size]
    old = sum(i < known for i in ids)
    return old, len(ids) - old


# ------------------------------------------------------------------------------------------------------------------
# Training

class Monitor:
    """Seconds per phase, images trained on, and the stop on a non-finite loss; no step waits for the device.

    `on_step(images)` is called after every step, `on_epoch(task, epoch, loss)` after every epoch.
    """

    def __init__(self):
        self.seconds, self.images = defaultdict(float), 0
        self.on_step, self.on_epoch = lambda images: None, lambda task, epoch, loss: None

    @contextlib.contextmanager
    def phase(self, name):
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start

    def batches(self, iterable):
        """The iterable, the time it takes counted as "augment"."""
        iterator = iter(iterable)
        while True:
            with self.phase("augment"):
                batch = next(iterator, None)
            if batch is None:
                return
            yield batch

    def step(self, images):
        self.images += images
        self.on_step(images)

    def epoch(self, task, epoch, losses):
        """End of an epoch, the only place where the losses are looked at."""
        losses = torch.stack(losses)
        finite = torch.isfinite(losses)
        if not finite.all():
            step = int(finite.long().argmin())
            raise UserError(f"The loss became {losses[step].item()} in task {task + 1}, epoch {epoch + 1}, "
                            f"step {step + 1}; a lower --lr or --first-lr usually helps.")
        self.on_epoch(task, epoch, losses.mean().item())


def frozen(module):
    """A copy in eval mode that no gradient reaches."""
    return copy.deepcopy(module).eval().requires_grad_(False)


class Strategy:
    """A backbone that learns task after task; subclasses say what changes before and after a task, and give the loss.

    `memory` holds what a method keeps between tasks beside its networks (prototypes, covariances): tensors and numbers.
    """

    frozen_after_first = False  # True where the backbone stands still after the first task: no drift, nothing to compensate
    rows_per_class = 1  # of the head
    weights_file = None  # pre-trained weights to begin with
    reads_old_tasks = False  # True only for methods that are not exemplar-free
    label_fractions = (1.0,)  # shares of labelled images that prototypes are made from
    first_task = FIRST_TASK  # strategies with the same recipe and settings learn the same first task, and share it

    def __init__(self, settings, image_size, *, seed=0, device="cpu", amp=False, compile=False):
        torch.manual_seed(seed)
        self.settings, self.seed, self.device, self.amp = SimpleNamespace(**settings), seed, torch.device(device), amp
        backbone = build_backbone(self.settings, image_size)
        self.net = nn.ModuleDict({"backbone": backbone, **self.build_heads(backbone.dim)})
        # channels-last pays on the CPU too: 1.1-1.9 times the images per second at width 16
        self.net.to(self.device, memory_format=torch.channels_last)
        self.forward = torch.compile(backbone) if compile else backbone
        self.memory, self.monitor, self.dim = {}, Monitor(), backbone.dim

    def build_heads(self, dim):
        if self.settings.head not in HEADS:
            raise UserError(f"--head {self.settings.head} is unknown; expected one of {', '.join(HEADS)}.")
        return {"head": HEADS[self.settings.head](dim)}

    # What happens in a task

    def learn(self, task):
        """f_{t-1} -> f_t with a fresh optimiser and schedule; the last epoch's weights are kept."""
        # one seed per (run, task): a run resumed at task t draws what an undisturbed one draws
        torch.manual_seed(self.seed * 1000 + task.index)
        self.start(task)
        self.fit(task, *self.optimizer(task), self.epochs(task.index))
        self.finish(task)

    def start(self, task):
        if self.weights_file and task.index == 0:
            load_vit_weights(self.net["backbone"], self.weights_file, self.settings.final_norm)
        self.net["head"].grow(self.rows_per_class * task.classes.stop)
        self.net.train()

    def finish(self, task):
        """Fill `memory` after a task; also called on a first task taken over from another run, so it draws from seeds of its own."""

    def epochs(self, index):
        return self.settings.first_epochs if index == 0 else self.settings.epochs

    def optimizer(self, task):
        """SGD with step decay; weight decay reaches batch-norm and sigma too (ldc)."""
        s, first = self.settings, task.index == 0
        optimizer = torch.optim.SGD(self.groups(s.first_lr if first else s.lr), momentum=s.momentum,
                                    weight_decay=s.first_weight_decay if first else s.weight_decay)
        milestones = s.first_milestones if first else s.milestones
        return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, list(milestones), 0.1)

    def groups(self, lr):
        """Parameter groups: the backbone at this rate, the heads at `head_lr_factor` times it."""
        heads = [p for name, module in self.net.items() if name != "backbone" for p in module.parameters()]
        return [{"params": list(self.net["backbone"].parameters()), "lr": lr},
                {"params": heads, "lr": lr * self.settings.head_lr_factor}]

    def batches(self, task, generator):
        """One epoch of what `loss` takes."""
        return task.epoch(self.settings.batch_size, generator)

    def loss(self, x, y):
        raise NotImplementedError

    def fit(self, task, optimizer, scheduler, epochs):
        """Plain training: `epochs` epochs of augmented batches through `self.loss`."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + task.index)
        for epoch in range(epochs):
            losses = []
            for batch in self.monitor.batches(self.batches(task, generator)):
                with self.monitor.phase("step"):
                    loss = self.loss(*batch)
                    optimizer.zero_grad(set_to_none=True)
                    loss.backward()
                    optimizer.step()
                losses.append(loss.detach())
                self.monitor.step(len(batch[0]))
            scheduler.step()
            self.monitor.epoch(task.index, epoch, losses)

    # Forward passes: convolutions in bfloat16 where amp is on; features, heads and losses in float32

    def embed(self, x, backbone=None):
        """Normalised images (B, 3, H, W) -> features (B, d), by the network in training unless another one is given."""
        x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.amp):
            return (backbone or self.forward)(x).float()

    def snapshot(self):
        """The frozen feature extractor f_t: a copy in eval mode, which later training cannot touch."""
        backbone = frozen(self.net["backbone"])
        return lambda x: self.embed(x, backbone)

    @torch.no_grad()
    def features(self, images):
        """Features of normalised images in the current space, (B, d)."""
        return self.snapshot()(images)

    @torch.no_grad()
    def task_features(self, task):
        """Features of the task's clean images in the current space, (N, d)."""
        with self.monitor.phase("features"):
            model = self.snapshot()
            return torch.cat([model(task.clean(x)) for x in task.clean_images.split(self.settings.batch_size)])

    # What a checkpoint holds: tensors, numbers and strings only, so that weights_only=True loads it

    def state(self):
        return {"classes": len(self.net["head"].weight), "net": self.net.state_dict(), "memory": self.memory}

    def load_state(self, state):
        self.net["head"].grow(state["classes"])
        self.net.load_state_dict(state["net"])
        self.memory = state["memory"]


class Finetune(Strategy):
    """Cross-entropy on the current task's logits, and nothing to hold old features in place."""

    def start(self, task):
        super().start(task)
        self.known = task.classes.start

    def loss(self, x, y):
        return F.cross_entropy(self.net["head"](self.embed(x))[:, self.known:], y - self.known)


class LwF(Finetune):
    """Learning without forgetting with a cosine head: the backbone of Table 1's LwF rows."""

    def start(self, task):
        self.teacher = frozen(self.net) if task.index else None  # the old network with its own head and sigma
        super().start(task)

    def loss(self, x, y):
        if self.teacher is None:
            return super().loss(x, y)
        with torch.no_grad():
            old_logits = self.teacher["head"](self.embed(x, self.teacher["backbone"]))
        return lwf_loss(self.net["head"](self.embed(x)), old_logits, y, self.settings.lambda_kd, self.settings.temperature)


class Joint(Strategy):
    """Incremental joint training, the upper bound of Figure 1: every task trains on all classes so far."""

    # differs: the paper gives no recipe; we keep the weights and train on the union with the incremental settings
    reads_old_tasks = True

    def loss(self, x, y):
        return F.cross_entropy(self.net["head"](self.embed(x)), y)


class OwnClassifier(Strategy):
    """A strategy with a classifier of its own: `classify` takes features (B, d) to class indices (B,)."""

    @torch.no_grad()
    def classify(self, feats):
        return self.net["head"](feats).argmax(1)

    def predict(self, images):
        """Class indices of normalised images, (B,)."""
        return self.classify(self.features(images))


class Pass(OwnClassifier):
    """PASS (CVPR 2021) as PyCIL has it: rotated classes, feature distillation, old classes rehearsed as noisy prototypes.

    memory: `means` (C, d), never moved, and `variance` (C,), the mean variance of a feature within each class.
    """

    rows_per_class = 4
    first_task = "pass", (*BACKBONE, "batch_size", "first_epochs", "lr", "weight_decay", "first_milestones", "temperature")

    def build_heads(self, dim):
        return {"head": LinearHead(dim, uniform_rows(math.sqrt(3)))}

    def start(self, task):
        super().start(task)
        self.teacher = frozen(self.net["backbone"]) if self.memory else None
        # B * floor(C_old / C_new), and B where the new task is the larger one
        self.draws = self.settings.batch_size * max(1, task.classes.start // len(task.classes))

    def optimizer(self, task):
        s = self.settings
        optimizer = torch.optim.Adam(self.net.parameters(), lr=s.lr, weight_decay=s.weight_decay)
        milestones = s.milestones if task.index else s.first_milestones
        return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, list(milestones), 0.1)

    def loss(self, x, y):
        s, head, x = self.settings, self.net["head"], rotate4(x)
        old = ()
        if self.memory:
            means, radius = self.memory["means"], self.memory["variance"].mean().sqrt()
            c = torch.randint(len(means), (self.draws,), device=means.device)
            with torch.no_grad():
                old = self.embed(x, self.teacher), means[c] + radius * torch.randn_like(means[c]), c
        return pass_loss(head, self.embed(x), y, *old, temperature=s.temperature, lambda_fkd=s.lambda_fkd,
                         lambda_proto=s.lambda_proto)

    def finish(self, task):
        groups = by_class(self.task_features(task), task.labels, task.classes)
        new = {"means": torch.stack([group.mean(0) for group in groups]),
               # differs: the official code fixes the radius after the first task; PyCIL's takes in every class
               "variance": torch.stack([covariance(group).diagonal().mean() for group in groups]).to(groups[0])}
        self.memory = {name: torch.cat([self.memory[name], part]) if self.memory else part for name, part in new.items()}

    @torch.no_grad()
    def classify(self, feats):
        return self.net["head"](feats)[:, ::4].argmax(1)


class FrozenBackbone(OwnClassifier):
    """Learns the first task as LwF does; then the backbone stands still and only the classifier takes in new classes."""

    frozen_after_first = True

    def learn(self, task):
        super().learn(task) if task.index == 0 else self.finish(task)

    def epochs(self, index):
        return self.settings.first_epochs if index == 0 else 0

    def loss(self, x, y):
        return F.cross_entropy(self.net["head"](self.embed(x)), y)


class FeTrIL(FrozenBackbone):
    """FeTrIL (WACV 2023): a linear classifier on new features and on pseudo-features of old classes, made by translation.

    memory: `means` (C, d), and the classifier's `weight` (C, d) and `bias` (C,).
    """

    def finish(self, task):
        # here, not in learn(): a first task taken over from another run has not drawn what training draws
        torch.manual_seed(self.seed * 1000 + task.index)
        feats, labels = self.task_features(task), task.labels
        means = torch.stack([group.mean(0) for group in by_class(feats, labels, task.classes)])
        # differs: PyCIL's first head is the one that trained the backbone; LwF's is a cosine head, so ours begins afresh
        head = LinearHead(self.dim, uniform_rows(math.sqrt(3)))
        if self.memory:
            feats, labels = fetril_features(feats, labels, task.classes, self.memory["means"])
            means = torch.cat([self.memory["means"], means])
            head.weight, head.bias = nn.Parameter(self.memory["weight"].clone()), nn.Parameter(self.memory["bias"].clone())
        head.grow(task.classes.stop)
        self.fit_head(head.to(self.device), feats, labels, task.index)
        self.memory = {"means": means, "weight": head.weight.detach(), "bias": head.bias.detach()}

    def fit_head(self, head, feats, labels, index):
        """Train the classifier on cached features (N, d), labels (N,)."""
        s = self.settings
        optimizer = torch.optim.SGD(head.parameters(), lr=s.head_lr, momentum=s.momentum, weight_decay=s.head_weight_decay)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, s.head_epochs)
        for epoch in range(s.head_epochs):
            losses = []
            with self.monitor.phase("step"):
                for i in torch.randperm(len(feats)).to(feats.device).split(s.batch_size):
                    loss = F.cross_entropy(head(feats[i]), labels[i])
                    optimizer.zero_grad(set_to_none=True)
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.detach())
            scheduler.step()
            self.monitor.epoch(index, epoch, losses)

    @torch.no_grad()
    def classify(self, feats):
        return F.linear(feats, self.memory["weight"], self.memory["bias"]).argmax(1)


class FeCAM(FrozenBackbone):
    """FeCAM (NeurIPS 2023): nearest class mean in a metric of each class, from its covariance on the frozen backbone.

    memory: `means` (C, d), raw, and `inverses` (C, d, d), one float32 matrix for each class and no more.
    """

    def finish(self, task):
        s, groups = self.settings, by_class(self.task_features(task), task.labels, task.classes)
        if s.tukey != 1 and any((group < 0).any() for group in groups):
            raise UserError("the backbone's features are negative in places, and FeCAM takes their root; use --tukey 1.")
        if min(len(group) for group in groups) < 2:
            raise UserError("FeCAM takes the covariance of every class, which needs at least two images of each.")
        new = {"means": torch.stack([group.mean(0) for group in groups]),
               "inverses": torch.stack([fecam_inverse(group, s.tukey, s.shrinkage) for group in groups])}
        self.memory = {name: torch.cat([self.memory[name], part]) if self.memory else part for name, part in new.items()}

    @torch.no_grad()
    def classify(self, feats):
        weight = self.net["head"].weight
        if len(weight) == len(self.memory["means"]):  # fecam: after the first task the cosine head decides
            return (F.normalize(feats, dim=1) @ F.normalize(weight, dim=1).T).argmax(1)
        return fecam_distance(feats, self.memory["means"], self.memory["inverses"], self.settings.tukey).argmin(1)


class EFC(OwnClassifier):
    """EFC (ICLR 2024): a regulariser in the metric of its classifiers, and old classes rehearsed as Gaussian prototypes.

    memory: `means` (C, d) moved by the drift, `factors` (C, d, d) Cholesky factors of the covariances, `E` (d, d).
    """

    # differs: efc crops CIFAR by RandomResizedCrop without AutoAugment; here every strategy has the data set's augmentation
    first_task = "efc", (*BACKBONE, "batch_size", "momentum", "first_optimizer", "first_epochs", "first_lr",
                         "first_weight_decay", "first_milestones")

    def build_heads(self, dim):
        return {"head": LinearHead(dim, uniform_rows(1), bias=False)}  # efc's heads of all tasks, one below another

    def start(self, task):
        super().start(task)
        self.known, self.seen, self.previous = task.classes.start, task.classes.stop, None
        self.rng = random.Random(self.seed * 1000 + task.index)
        if not self.memory:
            self.net["rotations"] = nn.Linear(self.dim, 3 * self.seen, device=self.device)
            return
        self.teacher = frozen(self.net["backbone"])
        for module in self.net["backbone"].modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval().requires_grad_(False)

    def optimizer(self, task):
        s, first = self.settings, task.index == 0
        if s.first_optimizer not in ("adam", "sgd"):
            raise UserError(f"--first-optimizer {s.first_optimizer} is unknown; expected adam or sgd.")
        if not first:  # at a constant rate
            optimizer = torch.optim.Adam(self.groups(s.lr), weight_decay=s.weight_decay)
        elif s.first_optimizer == "adam":
            optimizer = torch.optim.Adam(self.net.parameters(), lr=s.first_lr, weight_decay=s.first_weight_decay)
        else:
            optimizer = torch.optim.SGD(self.net.parameters(), lr=s.first_lr, momentum=s.momentum,
                                        weight_decay=s.first_weight_decay)
        return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, list(s.first_milestones) if first else [], 0.1)

    def loss(self, x, y):
        s, head = self.settings, self.net["head"]
        if not self.memory:
            feats = self.embed(rotate4(x))
            logits = torch.cat([head(feats), self.net["rotations"](feats)], 1)
            return F.cross_entropy(logits, efc_rotations(y, self.seen))
        old, new = efc_shares(self.known, self.seen, s.batch_size, self.rng) if self.previous else (s.batch_size, 0)
        older_x, older_y = self.previous or (x, y)
        self.previous = x, y
        with torch.no_grad():
            feats_old = self.embed(x, self.teacher)
        feats = self.embed(torch.cat([x, older_x[:new]]))
        return efc_loss(head, feats, feats_old, torch.cat([y, older_y[:new]]), *self.draw(old), self.memory["E"],
                        self.known, s.lambda_efm, s.eta_efm)

    def draw(self, count):
        """Samples (count, d) of the old classes' Gaussians, as many of each class as possible, and their labels (count,)."""
        means, factors = self.memory["means"], self.memory["factors"]
        size = self.settings.batch_size
        c = torch.randperm(len(means), device=means.device).repeat(-(-size // len(means)))[:size]
        c = c[torch.randperm(size, device=means.device)][:count]
        return means[c] + (factors[c] @ torch.randn_like(means[c])[:, :, None]).squeeze(2), c

    @torch.no_grad()
    def finish(self, task):
        s, parts = self.settings, []
        if "rotations" in self.net:
            del self.net["rotations"]
        # differs: efc passes over the augmented images three times, we once
        model, old = self.snapshot(), self.teacher if self.memory else None
        for x, y in task.epoch(s.batch_size, torch.Generator().manual_seed(self.seed * 1000 + task.index)):
            parts.append((model(x), self.embed(x, old) if old else x[:0], y))
        feats, feats_old, labels = (torch.cat(part) for part in zip(*parts))
        groups = by_class(feats, labels, task.classes)
        means = torch.stack([group.mean(0) for group in groups])
        jitter = 1e-5 * torch.eye(self.dim, dtype=torch.float64)
        factors = torch.stack([torch.linalg.cholesky(covariance(group) + jitter) for group in groups]).to(means)
        if self.memory:  # by the matrix of the task before, as efc does
            moved = efc_drift(self.memory["means"], feats_old, feats, self.memory["E"], s.efc_sigma)
            means, factors = torch.cat([moved, means]), torch.cat([self.memory["factors"], factors])
        self.memory = {"means": means, "factors": factors, "E": feature_matrix(feats, self.net["head"].weight, s.batch_size)}


STRATEGIES = {"finetune": Finetune, "lwf": LwF, "joint": Joint, "pass": Pass, "fetril": FeTrIL, "fecam": FeCAM, "efc": EFC}
