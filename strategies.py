"""A backbone learns one task: backbones, heads, losses, and one small class per strategy.

A strategy has `learn(task)` and `snapshot()`, the frozen feature extractor f_t that everything post hoc reads
(prototypes, drift compensation, evaluation). Strategies with a classifier of their own also have `predict(images)`.
To add one: write a class, enter it in STRATEGIES, give it its settings in PRESETS.
"""
import contextlib
import copy
import functools
import json
import math
import random
import re
import sys
import time
import zipfile
import zlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from data import UserError, download, rotate4

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
    "head_lr": "learning rate of FeTrIL's linear classifier, annealed to zero by a cosine; peak rate of NNCSL's",
    "head_weight_decay": "weight decay of FeTrIL's linear classifier",
    "tukey": "exponent that FeCAM applies to features; needs features that are never negative, 1 leaves them alone",
    "shrinkage": "FeCAM's pull of each covariance towards its mean variance and its mean covariance, applied twice",
    "lambda_fkd": "weight of PASS's feature distillation",
    "lambda_proto": "weight of PASS's cross-entropy on noisy prototypes",
    "lambda_efm": "weight of EFC's pull along the directions that its classifiers depend on",
    "eta_efm": "weight of EFC's pull along all directions",
    "efc_sigma": "width of EFC's kernel for the drift of its prototypes",
    "first_optimizer": "optimiser of EFC's first task: adam or sgd",
    "projector_width": "width of the Barlow Twins projector",
    "views": "the two views: asymmetric (CaSSLe, PFR; solarises the second), symmetric (POCON; SimCLR's), mild (larger crops, no grey) "
             "or crops (the same, colours untouched)",
    "warmup_epochs": "epochs in which the learning rate rises, in every task",
    "warmup_lr": "learning rate that the rise starts from",
    "final_lr": "learning rate at the end of NNCSL's cosine",
    "barlow_lambda": "weight of the off-diagonal correlations in Barlow Twins",
    "barlow_scale": "factor of the Barlow Twins loss, and of CaSSLe's distillation",
    "lambda_distill": "weight of PFR's or CaSSLe's distillation",
    "bn_leak": "pass images of all classes, past and future, through batch-norm, as CaSSLe's and PFR's CIFAR-100 code does",
    "expert_epochs": "epochs of POCON's expert in every task; its main network learns for --first-epochs, then --epochs",
    "lambda_retro": "weight of POCON's distillation from the old main network",
    "pocon_projectors": "POCON's projectors: command (4 layers and linear, as its command line) or paper (2 layers each)",
    "label_fractions": "shares of labelled images; prototypes are made and scored for each, from one backbone",
    "label_fraction": "share of labelled images that training may use",
    "buffer_size": "labelled images of old classes that NNCSL keeps, in total; 0 for none",
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
    label_fraction=1.0,  # P, Tables 3 and 4 also 0.008 (0.01), 0.05 and 0.25
)
EFC_SETTINGS = dict(  # efc scripts/experiments_efc.sh and its defaults
    BACKBONE, batch_size=64, first_optimizer="adam", first_epochs=100, first_lr=1e-3, first_weight_decay=2e-4,
    first_milestones=(45, 90), momentum=0.9, epochs=100, lr=1e-4, head_lr_factor=1.0, weight_decay=2e-4,
    lambda_efm=10.0, eta_efm=0.1, efc_sigma=0.2,
)
LWF = dict(SGD, lambda_kd=10.0, temperature=2.0)  # P, S
# C: CaSSLe's code, PF: PFR's port into it, PO: POCON's code, N: NNCSL's code, P: the LDC paper, S: its supplement
SELF_SUPERVISED = dict(
    {**BACKBONE, "stem": "cifar-pad2"}, projector_width=2048, batch_size=256,  # C, PF, PO
    momentum=0.9, bn_leak=False,  # differs: C and PF leak on CIFAR-100
    label_fractions=(0.008, 0.05, 0.25, 1.0),  # P; 4, 25, 125 and 500 images of a CIFAR-100 class
)
BARLOW = dict(
    SELF_SUPERVISED, views="asymmetric", barlow_lambda=0.005, barlow_scale=0.1,  # C, PF
    first_epochs=500, epochs=500,  # S, C
    lr=0.3, warmup_epochs=10, warmup_lr=0.003, weight_decay=1e-4,  # C, PF
)
CASSLE = dict(BARLOW, lambda_distill=1.0)  # C
PFR = dict(BARLOW, lambda_distill=25.0)  # S; differs: PF's script leaves it at 1
POCON = dict(
    SELF_SUPERVISED, views="symmetric", barlow_lambda=0.0051, barlow_scale=0.025,  # PO
    expert_epochs=500, first_epochs=500, epochs=250, lr=0.01, weight_decay=5e-4,  # PO
    lambda_retro=25.0, pocon_projectors="command",  # PO
)
IMAGENET_SSL = dict(stem="standard", label_fractions=(0.01, 0.05, 0.25, 1.0))  # C, PO; P
BARLOW_IMAGENET = dict(IMAGENET_SSL, first_epochs=400, epochs=400, lr=0.4)  # S, C
# Table 6 stores N features of each class and projects them; a linear p_F commutes with the mean, so N labelled images do
STORED = (5, 50, 100, 500)
NNCSL = dict(  # N, configs/nncsl/cifar100
    {**BACKBONE, "stem": "cifar-pad2"}, batch_size=256, first_epochs=250, epochs=250,
    lr=1.2, warmup_epochs=10, warmup_lr=0.08, final_lr=0.032, head_lr=0.12, momentum=0.9, weight_decay=1e-5,
    label_fraction=0.05, buffer_size=500,  # P also 0.008, 0.25 and buffer 0
)
VIEWS = "asymmetric", "symmetric", "mild", "crops"

PRESETS = {  # strategy -> data set -> settings; "*" holds what all data sets share
    "finetune": {"*": SGD, **SGD_BY_DATASET, "cars": SLCA_CARS},
    "lwf": {"*": LWF, **SGD_BY_DATASET, "imagenet100": dict(stem="imagenet", lambda_kd=5.0)},  # S: lambda 5
    "joint": {"*": SGD, **SGD_BY_DATASET},
    # differs: the official PASS trains ImageNet100 with SGD first and without a temperature; the paper cites PyCIL's PASS
    "pass": {"*": PASS_SETTINGS, **STEM_BY_DATASET, "demo": dict(lr=3e-3)},  # demo: ours, for few steps and a narrow network
    # pycil exps/fetril.json, S "same as PyCIL"
    "fetril": {"*": dict(FIRST, head_epochs=50, head_lr=0.05, head_weight_decay=5e-4), **STEM_BY_DATASET},
    "fecam": {"*": dict(FIRST, tukey=0.5, shrinkage=(1.0, 1.0)), **STEM_BY_DATASET},  # S
    "efc": {"*": EFC_SETTINGS, **STEM_BY_DATASET, "imagenet100": dict(  # efc: the standard stem, SGD first, heads at 1e-4
        stem="standard", first_optimizer="sgd", first_lr=0.1, first_weight_decay=5e-4, first_epochs=160,
        first_milestones=(80, 120, 150), lr=1e-5, head_lr_factor=10.0), "demo": dict(first_lr=3e-3)},  # ours, as PASS's
    "joint-ssl": {"*": BARLOW, "imagenet100": BARLOW_IMAGENET},
    "pfr": {"*": PFR, "imagenet100": BARLOW_IMAGENET},
    "cassle": {"*": CASSLE, "imagenet100": BARLOW_IMAGENET},
    # PO publishes no ImageNet command: C's epochs in PO's proportions
    "pocon": {"*": POCON, "imagenet100": dict(IMAGENET_SSL, expert_epochs=400, first_epochs=400, epochs=200)},
    # N's 1 % configuration for all fractions; P: buffers 5120 and 500
    "nncsl": {"*": NNCSL, "imagenet100": dict(stem="standard", batch_size=64, first_epochs=100, epochs=100, warmup_lr=0.3,
                                              final_lr=0.064, buffer_size=5120),
              "demo": dict(first_epochs=150, epochs=100, label_fraction=0.25, buffer_size=250)},  # ours
}

SCALES = {  # one rule for every strategy: epochs, milestones and warm-ups and batches shrink by a factor,
    # the width is capped, and projectors shrink with it
    "paper": dict(first_epochs=1.0, epochs=1.0, width=64, batch_size=1.0, limit=None),
    "small": dict(first_epochs=0.25, epochs=0.15, width=16, batch_size=1.0, limit=None),
    "demo": dict(first_epochs=0.1, epochs=0.08, width=8, batch_size=0.25, limit=None),
    "smoke": dict(first_epochs=0.01, epochs=0.01, width=8, batch_size=0.25, limit=20),  # images per class
}
# Schedules of our own where a share of the original's is too long for a CPU: scale -> strategy, or "barlow" for all that use it.
# Barlow Twins in a few hundred steps a task: at its rate LARS turns every layer by a fifth a step, which takes thousands of steps
# to pay; at the rate that its warm-up starts from it is plain SGD, as POCON's (0.003 x barlow_scale 0.1 = 0.01 x 0.025). Ten classes
# of CIFAR-100, three epochs, nearest mean: random 28.8, 0.01 27.7, 0.003 31.4. PASS sees four rotations of
# every image in an epoch, EFC in those of its first task; after it, 8 epochs of EFC's half batches are as many steps as LwF's 15.
SHORT = {"small": {"barlow": dict(first_epochs=20, epochs=6, expert_epochs=6, batch_size=64, views="mild"),
                   "pass": dict(first_epochs=12, epochs=4, first_milestones=(5, 11), milestones=(2,)),
                   "efc": dict(first_epochs=12, epochs=8, first_milestones=(5, 11))},
         "demo": {"barlow": dict(first_epochs=12, epochs=8, expert_epochs=8, batch_size=32, views="crops")}}


def resolve_settings(strategy, dataset, scale, overrides):
    """Preset for (strategy, data set), shrunk to the scale, then the user's flags: flag > preset > default."""
    rule, settings = SCALES[scale], {**PRESETS[strategy]["*"], **PRESETS[strategy].get(dataset, {})}
    for name, value in settings.items():
        factor = rule["first_epochs" if name.startswith("first_") else "epochs"]
        if name.endswith("epochs"):
            settings[name] = max(1, round(value * factor))
        elif name.endswith("milestones"):
            settings[name] = tuple(max(1, round(m * factor)) for m in value)
        elif name == "batch_size":
            settings[name] = round(value * rule[name])
        elif name == "width":
            settings[name] = min(value, rule[name])
        elif name.endswith("_width"):
            settings[name] = round(value * min(1, rule["width"] / BACKBONE["width"]))
    barlow = "barlow_scale" in settings
    short = SHORT.get(scale, {}).get("barlow" if barlow else strategy, {})
    settings.update({name: value for name, value in short.items() if name in settings})
    if short and barlow:
        settings["lr"] = settings.get("warmup_lr", settings["lr"])
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
    "cifar-pad2": (3, 1, 2, False),  # all self-supervised repositories: 34 x 34 maps, a quarter more work
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
    return target if target.exists() else download(url, target, f"fetch it by hand and put it at {target}, or name "
                                                                "another file with --weights.")


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
# Self-supervised losses, LARS and schedules


def barlow_twins_loss(z1, z2, lam=0.005, scale=0.1):
    """Barlow Twins: scale * (sum_i (C_ii - 1)^2 + lam * sum_{i != j} C_ij^2), C the correlation of z1's and z2's columns.

    z1, z2: (N, D). C is never made: sum C_ij^2 = <Z1 Z1^T, Z2 Z2^T> / N^2 with standardised Z, two N x N matrices.
    """
    z1, z2 = (F.batch_norm(z, None, None, training=True) for z in (z1, z2))  # biased variance, eps 1e-5
    diagonal = (z1 * z2).mean(0)
    total = ((z1 @ z1.T) * (z2 @ z2.T)).sum() / len(z1) ** 2
    return scale * ((diagonal - 1).square().sum() + lam * (total - diagonal.square().sum()))


def cosine_distance(predicted, target):
    """PFR: minus the mean cosine between the rows of two (N, d) matrices."""
    return -F.cosine_similarity(predicted, target).mean()


def frobenius_distance(predicted, target):
    """POCON: Frobenius norm of the difference of two (N, d) matrices with unit rows; neither squared nor averaged."""
    difference = F.normalize(predicted, dim=1) - F.normalize(target, dim=1)
    return (difference.square().sum() + 1e-12).sqrt()  # the floor keeps the gradient finite at zero


def soft_neighbours(z, support, tau=0.1, smoothing=0.1):
    """NNCSL, PAWS: class probabilities of z (n, d) by its similarity to support (m, K, d), m images of K classes -> (n, K).

    softmax(cos(z, support) / tau) Y with labels Y smoothed over the K classes; as the softmax sums to one, so is its result.
    """
    similarity = F.normalize(z, dim=1) @ F.normalize(support, dim=2).flatten(0, 1).T
    probability = F.softmax(similarity / tau, 1).unflatten(1, support.shape[:2]).sum(1)
    return (1 - smoothing) * probability + smoothing / support.shape[1]


def sharpen(p):
    """p^4 / sum p^4, a temperature of 0.25."""
    return p.pow(4) / p.pow(4).sum(1, keepdim=True)


def cross_entropy(target, p):
    return -(target * p.log()).sum(1).mean()


def paws_loss(p):
    """PAWS: each view predicts the other's sharpened assignment, small crops the mean of both.

    p: (4B, K) by soft_neighbours for two large and two small views, in this order.
    """
    first, second = sharpen(p.detach()[:len(p) // 2]).chunk(2)
    small = (first + second) / 2
    target = torch.cat([second, first, small, small])
    return cross_entropy(torch.where(target < 1e-4, 0.0, target), p)


def memax_loss(p):
    """PAWS: minus the entropy of the mean sharpened assignment, at least -log K; (n, K) -> scalar."""
    mean = sharpen(p).mean(0)
    return (mean * mean.log()).sum()


def nncsl_loss(z, support, logits, labels, current, old_z=None, old_support=None):
    """NNCSL: PAWS + ME-MAX + 0.005 cross-entropy on the support + 0.2 distillation of neighbour relations.

    z: (4B, d) views; support: (m, K, d), its last `current` classes the current ones; logits: (mK, C) over the classes seen;
    labels: (mK,); old_z, old_support: the same by the frozen network, None in the first task.
    """
    p, known = soft_neighbours(z, support[:, -current:]), support.shape[1] - current
    loss = paws_loss(p) + memax_loss(p) + 0.005 * F.cross_entropy(logits, labels)
    if old_z is None:
        return loss
    part = slice(0, known or current)  # the buffer's classes; the current ones where there is no buffer
    return loss + 0.2 * cross_entropy(soft_neighbours(old_z, old_support[:, part]), soft_neighbours(z, support[:, part]))


class LARS(torch.optim.Optimizer):
    """SGD whose steps are scaled layer by layer: d = r (g + wd p) with r = trust |p| / (|g| + wd |p| + 1e-8).

    CaSSLe's (clip): r <- min(r / lr, 1), v = mu v + d, p -= lr v. NNCSL's: v = mu v + lr d, p -= v.
    A group with plain=True (biases, batch-norm) takes d = g. Nothing waits for the device.
    """

    def __init__(self, groups, lr, momentum, weight_decay, trust, clip, lr_in_velocity):
        super().__init__(groups, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, trust=trust, clip=clip,
                                      lr_in_velocity=lr_in_velocity, plain=False))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            velocity = [self.state[p].setdefault("velocity", torch.zeros_like(p)) for p in params]
            direction = [p.grad for p in params] if group["plain"] else self.scaled(params, group)
            before, after = (group["lr"], 1) if group["lr_in_velocity"] else (1, group["lr"])
            torch._foreach_mul_(velocity, group["momentum"])
            torch._foreach_add_(velocity, direction, alpha=before)
            torch._foreach_add_(params, velocity, alpha=-after)

    def scaled(self, params, group):
        """d of every parameter; plain g where its norm or the gradient's is zero."""
        grads, decay = [p.grad for p in params], group["weight_decay"]
        p_norm, g_norm = (torch.stack(torch._foreach_norm(tensors)) for tensors in (params, grads))
        ratio = group["trust"] * p_norm / (g_norm + decay * p_norm + 1e-8)
        if group["clip"]:
            ratio = (ratio / group["lr"]).clamp(max=1)
        ratio = torch.where((p_norm > 0) & (g_norm > 0), ratio, 0)
        decayed = torch._foreach_mul(torch._foreach_add(grads, params, alpha=decay), ratio.unbind())
        return torch._foreach_add(decayed, torch._foreach_mul(grads, ((p_norm == 0) | (g_norm == 0)).to(ratio).unbind()))


def cassle_lr(epoch, base, epochs, warmup, start):
    """CaSSLe's learning rate in an epoch: linear from `start` to `base` in `warmup` epochs, then cosine to 0."""
    if epoch < warmup:
        return start + epoch * (base - start) / max(1, warmup - 1)
    return base / 2 * (1 + math.cos(math.pi * (epoch - warmup) / max(1, epochs - warmup)))


def nncsl_lr(step, peak, steps, warmup, start, final):
    """NNCSL's learning rate in a step: linear from `start` to `peak` in `warmup` steps, then cosine to `final`."""
    if step < warmup:
        return start + (peak - start) * step / warmup
    return final + (peak - final) / 2 * (1 + math.cos(math.pi * min(1, (step - warmup) / max(1, steps - warmup))))


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
    schedule_every = "epoch"  # or "step": when the learning rate moves
    weights_file = None  # pre-trained weights to begin with
    reads_old_tasks = False  # True only for methods that are not exemplar-free
    label_fractions = (1.0,)  # shares of labelled images that prototypes are made from
    stored = ()  # and numbers of them in each class
    first_task = FIRST_TASK  # strategies with the same recipe and settings learn the same first task, and share it; or None

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
        task = self.visible(task)
        self.start(task)
        for epochs in self.phases(task):
            self.fit(task, *self.optimizer(task), epochs)
        self.finish(task)

    def visible(self, task):
        """What training may look at: all of the task, unless a strategy hides labels or images from itself."""
        return task

    def phases(self, task):
        """Epochs of each phase of a task; a strategy with several prepares a phase, then yields its epochs."""
        yield self.epochs(task.index)

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
                    if self.schedule_every == "step":
                        scheduler.step()
                losses.append(loss.detach())
                self.monitor.step(len(batch[0]))
            if self.schedule_every == "epoch":
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
    first_task = "pass", (*BACKBONE, "batch_size", "first_epochs", "lr", "weight_decay", "first_milestones", "temperature",
                          "label_fraction")

    def build_heads(self, dim):
        return {"head": LinearHead(dim, uniform_rows(math.sqrt(3)))}

    @property
    def label_fractions(self):
        return (self.settings.label_fraction,)

    def visible(self, task):
        """The labelled images alone: PASS has no use for the others."""
        if self.settings.label_fraction == 1:
            return task
        return task.subset(task.labelled(self.settings.label_fraction, self.seed)[0])

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


def mlp(*widths):
    """Linear layers of these widths, batch-norm and ReLU between them: (B, widths[0]) -> (B, widths[-1])."""
    # some repositories drop the biases before batch-norm; batch-norm takes them out again anyway
    layers = [layer for a, b in zip(widths, widths[1:]) for layer in (nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU())]
    return nn.Sequential(*layers[:-2])


@dataclass
class Target:
    """A distillation target, weight * sum over the views of distance(predictor(u(x_i)), u'(x_i)), u' frozen."""
    net: nn.ModuleDict  # frozen; in train mode its batch-norm uses the batch's statistics
    predictor: nn.Module
    tap: str  # what u is: "backbone" for features, "projector" for what the Barlow Twins projector makes of them
    distance: object
    weight: float


class BarlowTwins(Strategy):
    """Barlow Twins with a list of distillation targets: the trainer of PFR, CaSSLe and POCON. No label is read."""

    stored = STORED
    target = None  # what the frozen network of the task before teaches: a method that returns a Target
    first_task = "barlow", tuple(name for name in BARLOW if name not in ("epochs", "label_fractions"))

    def build_heads(self, dim):
        width = self.settings.projector_width
        return {"projector": mlp(dim, width, width, width)}

    @property
    def label_fractions(self):
        return self.settings.label_fractions

    def visible(self, task):
        return task.without_labels()

    def start(self, task):
        """One network learns by itself; after the first task also from its frozen self, by a predictor that persists."""
        self.net.train()
        self.student, self.with_barlow, self.trained, self.targets = None, True, self.net, []
        if task.index and self.target:
            if "predictor" not in self.net:
                self.net["predictor"] = self.build_predictor().to(self.device)
            # train mode, as CaSSLe and PFR leave it; this copy is not the f_{t-1} of snapshot()
            self.targets = [self.target(frozen(self.net).train())]

    def batches(self, task, generator):
        s = self.settings
        if s.views not in VIEWS:
            raise UserError(f"--views {s.views} is unknown; expected one of {', '.join(VIEWS)}.")
        arguments = dict(batch_size=min(s.batch_size, len(task)), generator=generator, drop_last=True, with_labels=False,
                         augment=functools.partial(task.two_views, recipe=s.views))
        epoch = task.epoch(**arguments)
        if s.bn_leak:
            everything = copy.copy(task)
            images = [task.dataset.train_images(c) for c in range(task.dataset.num_classes)]
            everything.images = torch.cat(images).to(self.device)
            epoch = ((*views, leak[1]) for views, leak in zip(epoch, everything.epoch(**arguments)))
        return epoch

    def loss(self, x1, x2, leak=None):
        s, views = self.settings, (x1, x2)
        # one forward per view: batch-norm has the statistics of one view at a time
        taps = {"backbone": [self.embed(x, self.student) for x in views]}
        loss = 0
        if self.with_barlow:
            taps["projector"] = [self.net["projector"](feats) for feats in taps["backbone"]]
            loss = barlow_twins_loss(*taps["projector"], s.barlow_lambda, s.barlow_scale)
        for target in self.targets:
            for x, u in zip(views, taps[target.tap]):
                loss = loss + target.weight * target.distance(target.predictor(u), self.frozen_tap(target, x))
        if leak is not None:
            with torch.no_grad():
                self.embed(leak, self.student)
        return loss

    @torch.no_grad()
    def frozen_tap(self, target, x):
        feats = self.embed(x, target.net["backbone"])
        return target.net["projector"](feats) if target.tap == "projector" else feats

    def optimizer(self, task):
        """LARS, warm-up and cosine, new in every task; biases and batch-norm are neither scaled nor decayed (C)."""
        s, params = self.settings, list(self.trained.parameters())
        groups = [{"params": [p for p in params if p.ndim > 1]},
                  {"params": [p for p in params if p.ndim == 1], "plain": True}]
        optimizer = LARS(groups, s.lr, s.momentum, s.weight_decay, trust=0.02, clip=True, lr_in_velocity=False)
        factor = lambda e: cassle_lr(e, s.lr, self.epochs(task.index), s.warmup_epochs, s.warmup_lr) / s.lr  # noqa: E731
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def state(self):
        return {"net": self.net.state_dict(), "memory": self.memory}

    def load_state(self, state):
        if any(name.startswith("predictor.") for name in state["net"]):  # there is none before the second task
            self.net["predictor"] = self.build_predictor().to(self.device)
        self.net.load_state_dict(state["net"])
        self.memory = state["memory"]


class JointSelfSupervised(BarlowTwins):
    """Barlow Twins on the images of all tasks so far, as Joint: the upper bound of Figure 1 (b)."""

    reads_old_tasks, stored = True, ()


class Pfr(BarlowTwins):
    """PFR: L_BT - lambda / 2 * sum_i mean cos(p(f(x_i)), f'(x_i)), p a 2-layer perceptron on features."""

    def build_predictor(self):
        return mlp(self.dim, self.dim // 2, self.dim)

    def target(self, net):
        return Target(net, self.net["predictor"], "backbone", cosine_distance, self.settings.lambda_distill / 2)


class Cassle(BarlowTwins):
    """CaSSLe: L_BT + lambda / 2 * sum_i L_BT(g(z_i), z'_i), z the projector's output, the same view on both sides."""

    def build_predictor(self):
        return mlp(*[self.settings.projector_width] * 3)

    def target(self, net):
        s = self.settings
        distance = functools.partial(barlow_twins_loss, lam=s.barlow_lambda, scale=s.barlow_scale)
        return Target(net, self.net["predictor"], "projector", distance, s.lambda_distill / 2)


class Pocon(BarlowTwins):
    """POCON, operator CopyOP: an expert learns the task freely; the main network learns from it and from its old self."""

    first_task = "pocon", tuple(name for name in POCON if name not in ("epochs", "label_fractions"))

    def build_heads(self, dim):
        if self.settings.pocon_projectors not in ("command", "paper"):
            raise UserError(f"--pocon-projectors {self.settings.pocon_projectors} is unknown; expected command or paper.")
        two_layers = self.settings.pocon_projectors == "paper"
        return {**super().build_heads(dim), "retrospection": mlp(dim, dim // 2, dim) if two_layers else nn.Linear(dim, dim)}

    def build_adaptation(self):
        d = self.dim
        return mlp(d, d // 2, d) if self.settings.pocon_projectors == "paper" else mlp(d, 2 * d, d, 2 * d, d)

    def start(self, task):
        self.net.train()
        if task.index == 0:  # PO: residual branches start at zero
            for m in self.net["backbone"].modules():
                if isinstance(m, BasicBlock):
                    nn.init.zeros_(m.bn2.weight)

    def epochs(self, index):
        return self.settings.expert_epochs + super().epochs(index)

    def phases(self, task):
        main, old = self.net["backbone"], frozen(nn.ModuleDict({"backbone": self.net["backbone"]}))
        self.student, self.with_barlow, self.targets = copy.deepcopy(main), True, []
        self.trained = nn.ModuleList([self.student, self.net["projector"]])
        yield self.settings.expert_epochs
        expert, adaptation = frozen(nn.ModuleDict({"backbone": self.student})), self.build_adaptation().to(self.device)
        self.targets = [Target(expert, adaptation, "backbone", frobenius_distance, 1.0)]
        if task.index:
            retro = Target(old, self.net["retrospection"], "backbone", frobenius_distance, self.settings.lambda_retro)
            self.targets.append(retro)
        self.student, self.with_barlow = None, False
        self.trained = nn.ModuleList([main, *(target.predictor for target in self.targets)])
        yield super().epochs(task.index)

    def optimizer(self, task):
        """SGD at a constant rate, weight decay on everything; differs: PO's command asks for 1e-4, its code takes 5e-4."""
        s = self.settings
        optimizer = torch.optim.SGD(self.trained.parameters(), lr=s.lr, momentum=s.momentum, weight_decay=s.weight_decay)
        return optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)


def balanced(labels, size):
    """Positions of at most `size` of the labelled items, spread evenly over the classes, the first of each class."""
    rank = (labels[:, None] == labels).tril(-1).sum(1)  # how many of its class come before an item
    order = (rank * (labels.max() + 1) + labels).argsort()
    return order[:size].sort().values


class Nncsl(Strategy):
    """NNCSL: unlabelled views are classified by a few labelled images, of old classes too where a buffer keeps some."""

    first_task = None  # its optimiser outlives the task: nothing to hand on without it
    schedule_every = "step"
    per_class = 3  # labelled images of each class in a step's support

    def build_heads(self, dim):
        return {"head": LinearHead(dim, uniform_rows(1)), "projector": mlp(dim, dim, dim, dim // 4)}

    @property
    def label_fractions(self):
        return (self.settings.label_fraction,)

    def visible(self, task):
        return task.without_labels()

    def start(self, task):
        self.teacher = frozen(self.net) if task.index else None
        self.current = len(task.classes)
        # differs: N has rows for all classes from the start; unseen ones act on LARS's norms only
        super().start(task)
        self.net.train(task.index == 0)  # N never leaves eval mode again: batch-norm stays at the first task's statistics

    def labelled_images(self, task):
        """Images and labels that support may be drawn from: the buffer's, then the current task's labelled ones."""
        index, labels = task.labelled(self.settings.label_fraction, self.seed)
        kept = self.memory.get("images", task.images[:0]), self.memory.get("labels", labels[:0])
        return torch.cat([kept[0], task.images[index]]), torch.cat([kept[1], labels])

    def finish(self, task):
        """Fill the buffer with labelled images only, at most `buffer_size` of them; keep LARS's velocities."""
        images, labels = self.labelled_images(task)
        if self.settings.buffer_size:
            keep = balanced(labels, self.settings.buffer_size)
            self.memory.update(images=images[keep], labels=labels[keep])
        state = self.lars.state
        self.memory["velocity"] = {name: state[p]["velocity"] for name, p in self.net.named_parameters() if p in state}
        self.lars = None

    def batches(self, task, generator):
        """Two large and two small views of B images, two views of the support, its labels: (x, x, small, small, s, s, y)."""
        images, labels = self.labelled_images(task)
        classes = sorted(set(labels.tolist()))
        members = [(labels == c).nonzero().squeeze(1).cpu() for c in classes]
        y = torch.tensor(classes, device=self.device).repeat(self.per_class)
        batch_size = min(self.settings.batch_size, len(task))
        for views in task.epoch(batch_size, generator, augment=task.multi_crop, drop_last=True, with_labels=False):
            # class-interleaved, so that support is (per_class, classes); a class with fewer labels repeats them
            drawn = [m[torch.randperm(len(m), generator=generator)[torch.arange(self.per_class) % len(m)]] for m in members]
            support = images[torch.stack(drawn, 1).flatten().to(images.device)]
            yield *views, *task.multi_crop(support, generator)[:2], y

    def project(self, net, images):
        """(features, embeddings) of same-sized images in one forward, as N: batch-norm sees views and support together."""
        sizes = [len(x) for x in images]
        feats = self.embed(torch.cat(images), None if net is self.net else net["backbone"])
        return feats.split(sizes), net["projector"](feats).split(sizes)

    def relations(self, net, views, support):
        """Embeddings of the views (4B, d), of the support (m, K, d), and the support's features (mK, D)."""
        feats, large = self.project(net, [*support, *views[:2]])
        small = self.project(net, views[2:])[1]
        z = torch.cat([*large[2:], *small])
        return z, torch.cat(large[:2]).unflatten(0, (2 * self.per_class, -1)), torch.cat(feats[:2])

    def loss(self, x1, x2, small1, small2, s1, s2, y):
        views, support = [x1, x2, small1, small2], [s1, s2]
        z, z_support, feats = self.relations(self.net, views, support)
        old = None, None
        if self.teacher is not None:
            with torch.no_grad():
                old = self.relations(self.teacher, views, support)[:2]
        return nncsl_loss(z, z_support, self.net["head"](feats), y.repeat(2), self.current, *old)

    def optimizer(self, task):
        """NNCSL's LARS; its velocities outlive the task, its learning rate starts anew and changes with every step."""
        s, plain, scaled = self.settings, [], []
        for name, p in self.net.named_parameters():
            if not name.startswith("head."):  # N excludes the names with "bias" or "bn": not a shortcut's batch-norm weight
                (plain if name.endswith("bias") or p.ndim == 1 and "shortcut" not in name else scaled).append(p)
        head = {"params": list(self.net["head"].parameters()), "lr": s.head_lr, "weight_decay": 0.0}
        self.lars = LARS([{"params": scaled}, {"params": plain, "plain": True}, head], s.lr, s.momentum, s.weight_decay,
                         trust=0.001, clip=False, lr_in_velocity=True)
        kept = self.memory.get("velocity", {})
        for name, p in self.net.named_parameters():
            if name in kept:  # zero for the head's new rows
                fresh = torch.zeros_like(p)
                fresh[:len(kept[name])] = kept[name]
                self.lars.state[p]["velocity"] = fresh
        per_epoch = max(1, len(task) // s.batch_size)
        steps, warmup = per_epoch * self.epochs(task.index), per_epoch * s.warmup_epochs
        factor = lambda i: nncsl_lr(i, s.lr, steps, warmup, s.warmup_lr, s.final_lr) / s.lr  # noqa: E731
        return self.lars, torch.optim.lr_scheduler.LambdaLR(self.lars, factor)

    def classify(self, feats):
        """NNCSL's own classifier: features (N, d) -> class indices (N,)."""
        return self.net["head"](feats).argmax(1)


STRATEGIES = {"finetune": Finetune, "lwf": LwF, "joint": Joint, "pass": Pass, "fetril": FeTrIL, "fecam": FeCAM, "efc": EFC,
              "joint-ssl": JointSelfSupervised, "pfr": Pfr, "cassle": Cassle, "pocon": Pocon, "nncsl": Nncsl}
