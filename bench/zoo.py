"""Networks of timm and transformers, and a few written out here, by both exporters of PyTorch: what is read, run, trained
and written again.

    cargo build --release
    python3 bench/zoo.py                 # makes an environment of its own, writes docs/networks.md
    python3 bench/zoo.py --only repvgg_a0,bert --no-train

Weights are random (batch norms with random statistics), images small where the network allows it. What simplicit computes is
compared with ONNX Runtime on two samples: the largest difference over the largest output. Training asks for half of the weights
with 64 random samples and takes the file of the older exporter where there is one.
"""

import json
import logging
import warnings

import page
import program
from program import run, shown

PACKAGES = ["torch", "torchvision", "timm", "transformers", "onnx", "onnxruntime", "onnxscript", "numpy"]
EXPORTERS = ["torchscript", "dynamo"]
# Networks of timm: the side of the image, and whether to train.
TIMM = {
    "mobilenetv4_conv_small_050": (64, True),
    "efficientnet_lite0": (64, True),
    "tf_efficientnet_b0": (64, True),
    "ghostnet_050": (64, True),
    "mobileone_s0": (64, False),
    "lcnet_050": (64, True),
    "tinynet_e": (64, True),
    "hardcorenas_a": (64, False),
    "efficientvit_b0": (64, True),
    "xcit_nano_12_p16_224": (64, True),
}
SMALL = {"vocab_size": 200, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
         "max_position_embeddings": 40, "num_labels": 3}
WAVE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "conv_dim": (16, 16, 16),
        "conv_kernel": (10, 3, 3), "conv_stride": (5, 2, 2), "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4}
PIXELS = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 4, 4],
          "decoder_hidden_size": 16, "num_labels": 3}
TOKENS = {"tokens": 200}
# Networks of transformers: class, its settings, sizes of a sample, and what it is made of.
TRANSFORMERS = {
    "bert": ("BertForSequenceClassification", SMALL, (12,), TOKENS),
    "distilbert": ("DistilBertForSequenceClassification",
                   {"vocab_size": 200, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "num_labels": 3}, (12,), TOKENS),
    "roberta": ("RobertaForSequenceClassification", SMALL, (12,), TOKENS),
    "albert": ("AlbertForSequenceClassification", SMALL | {"embedding_size": 16}, (12,), TOKENS),
    "deberta_v2": ("DebertaV2ForSequenceClassification", SMALL | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
                   (12,), TOKENS),
    "wav2vec2": ("Wav2Vec2ForSequenceClassification", WAVE, (800,), {}),
    "segformer": ("SegformerForSemanticSegmentation", PIXELS, (3, 64, 64), {}),
}
# Networks written out below, and one of torchvision.
OWN = {
    "unet": (3, 32, 32),
    "tcn": (4, 40),
    "autoencoder": (1, 28, 28),
    "frames": (4, 3, 16, 16),
    "masked_attention": (10,),
    "regression": (13,),
    "lraspp_mobilenet_v3_large": (3, 64, 64),
}
NETWORKS = [*TIMM, *TRANSFORMERS, *OWN]


def parse():
    parser = program.parser(__doc__.splitlines()[0], "zoo")
    parser.add_argument("--no-train", action="store_true", help="read and run alone")
    return parser.parse_args()


def about(name):
    """Sizes of a sample, what else to say about it, and whether it is trained."""
    if name in TIMM:
        side, trains = TIMM[name]
        return (3, side, side), {}, trains
    if name in TRANSFORMERS:
        _, _, sizes, more = TRANSFORMERS[name]
        return sizes, more, True
    return OWN[name], {"tokens": 50} if name == "masked_attention" else {}, name != "lraspp_mobilenet_v3_large"


def written_out(name):
    import torch
    import torchvision
    from torch import nn
    from torch.nn import functional

    def block(inputs, outputs):
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU())

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.ModuleList([block(3, 8), block(8, 16), block(16, 32)])
            self.up = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 4, 2, 1)])
            self.join = nn.ModuleList([block(32, 16), block(16, 8)])
            self.end = nn.Conv2d(8, 2, 1)

        def forward(self, x):
            a = self.down[0](x)
            b = self.down[1](functional.max_pool2d(a, 2))
            c = self.down[2](functional.max_pool2d(b, 2))
            b = self.join[0](torch.cat([self.up[0](c), b], 1))
            return self.end(self.join[1](torch.cat([self.up[1](b), a], 1)))

    class TemporalConvolutions(nn.Module):
        def __init__(self):
            super().__init__()
            sizes = [4, 16, 16, 16, 16]
            layers = [nn.Conv1d(sizes[k], 16, 3, dilation=2**k) for k in range(4)]
            self.layers = nn.ModuleList(nn.utils.parametrizations.weight_norm(layer) for layer in layers)
            self.end = nn.Linear(16, 3)

        def forward(self, x):
            for k, layer in enumerate(self.layers):
                y = functional.relu(layer(functional.pad(x, (2 * 2**k, 0))))
                x = y + x if k else y
            return self.end(x[:, :, -1])

    class Frames(nn.Module):
        def __init__(self):
            super().__init__()
            self.each = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU(),
                                      nn.AdaptiveAvgPool2d(1))
            self.end = nn.Linear(32, 5)

        def forward(self, x):
            return self.end(self.each(x.flatten(0, 1)).reshape(x.shape[0], -1))

    class MaskedAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.qkv, self.end = nn.Embedding(50, 32), nn.Linear(32, 96), nn.Linear(32, 4)

        def forward(self, tokens):
            counts = tokens != 0
            q, k, v = self.qkv(self.table(tokens)).reshape(*tokens.shape, 3, 4, 8).permute(2, 0, 3, 1, 4)
            x = functional.scaled_dot_product_attention(q, k, v, attn_mask=counts[:, None, None, :])
            weight = counts.float()[..., None]
            return self.end((x.transpose(1, 2).flatten(2) * weight).sum(1) / weight.sum(1).clamp(min=1))

    class Segmentation(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = torchvision.models.segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None)

        def forward(self, x):
            return self.network(x)["out"]

    if name == "autoencoder":
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(784, 32),
            nn.Linear(32, 784), nn.Unflatten(1, (16, 7, 7)), nn.ConvTranspose2d(16, 8, 3, 2, 1, 1), nn.ReLU(),
            nn.ConvTranspose2d(8, 1, 3, 2, 1, 1), nn.Sigmoid())
    if name == "regression":
        return nn.Sequential(nn.Linear(13, 64), nn.ELU(), nn.Linear(64, 64), nn.Softplus(), nn.Dropout(), nn.Linear(64, 1))
    return {"unet": UNet, "tcn": TemporalConvolutions, "frames": Frames, "masked_attention": MaskedAttention,
            "lraspp_mobilenet_v3_large": Segmentation}[name]()


def made(name):
    import torch

    if name in TIMM:
        import timm

        return timm.create_model(name, pretrained=False, num_classes=10, exportable=True)
    if name in OWN:
        return written_out(name)
    import transformers

    kind, settings, _, _ = TRANSFORMERS[name]

    class FirstOutput(torch.nn.Module):
        def __init__(self):
            super().__init__()
            network = getattr(transformers, kind)
            self.network = network(network.config_class(**settings))

        def forward(self, x):
            return self.network(x)[0]

    return FirstOutput()


def export(name, sizes, more, exporter, path):
    import torch

    torch.manual_seed(0)
    network = made(name).eval()
    program.with_random_norms(network)
    count = 2 if exporter == "dynamo" else 1
    sample = torch.randint(1, more["tokens"], (count, *sizes)) if "tokens" in more else torch.zeros(count, *sizes)
    with torch.no_grad():
        if exporter == "dynamo":
            batch = {0: torch.export.Dim("batch")}
            torch.onnx.export(network, (sample,), path, dynamo=True, dynamic_shapes=(batch,), external_data=False, verbose=False)
        else:
            torch.onnx.export(network, (sample,), path, dynamo=False, dynamic_axes={"input": {0: "batch"}},
                              input_names=["input"], output_names=["output"], opset_version=17)


def measure(args, name):
    import numpy

    sizes, more, trains = about(name)
    row = {"sizes": sizes}
    for exporter in EXPORTERS:
        path = args.folder / f"{name}_{exporter}.onnx"
        try:
            if not path.exists():
                export(name, sizes, more, exporter, str(path))
        except Exception as error:  # the exporter's own failure is a result, too
            row[exporter] = {"error": "not exported"}
            print(str(error).splitlines()[0][:160], flush=True)
            continue
        row[exporter] = program.measure(args, path, sizes, more)
        if args.no_train or not trains or row[exporter]["error"] or "sparsity" in row:
            continue
        row |= program.train(args, name, path, sizes, more)
        model, plain = args.folder / f"{name}.safetensors", args.folder / f"{name}.plain.onnx"
        if "sparsity" in row:
            row["plain_error"] = run(args, "export", model, "--out", plain).error
            if not row["plain_error"]:
                ours = numpy.load(args.folder / "out.npy")
                theirs = program.reference(plain, numpy.load(args.folder / "two.npy"), {})
                row["plain_difference"] = program.difference(ours, theirs)
    return row


def table(rows):
    head = ["network", "a sample", "parameters", "TorchScript", "Dynamo", "trained", "`--like`, difference", "plain export, difference"]
    lines = []
    for name, row in rows:
        found = [row[exporter].get("error") or shown(row[exporter], "difference", "{:.1e}") for exporter in EXPORTERS]
        first = next((row[exporter] for exporter in EXPORTERS if "parameters" in row[exporter]), {})
        exported = [program.refused(row.get(f"{kind}_error")) or shown(row, f"{kind}_difference", "{:.1e}") for kind in ("export", "plain")]
        sizes = " × ".join(map(str, row["sizes"]))
        lines.append([name, sizes, shown(first, "parameters", "{:,}"), *found, program.trained(row), *exported])
    return page.table(head, lines)


def main():
    args = parse()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    program.environment(args.environment, PACKAGES)
    args.folder.mkdir(parents=True, exist_ok=True)
    kept = args.folder / "rows.json"
    rows = json.loads(kept.read_text()) if kept.exists() else {}
    for name in args.only.split(",") if args.only else NETWORKS:
        rows[name] = rows.get(name, {}) | measure(args, name)
        print(name, json.dumps(rows[name]), flush=True)
        kept.write_text(json.dumps(rows, indent=1))
    text = table([(name, rows[name]) for name in NETWORKS if name in rows])
    print(text)
    if all(name in rows for name in NETWORKS):
        page.fill(args.page, "zoo", text)


if __name__ == "__main__":
    main()
