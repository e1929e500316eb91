import numpy as np
import pytest
from conftest import DATA, idx

import simplicit


@pytest.fixture(scope="module")
def fashion():
    network = simplicit.Network.from_onnx(DATA / "fashion_fc.onnx")
    train = idx("fashion_train_images.idx.gz")[:1000].reshape(1000, -1)
    model = simplicit.SIM(penalty="l1", scale=1 / 255).fit(network, train).model_
    images = idx("fashion_test_images.idx.gz")[:100].reshape(100, -1)
    return network, model, images, idx("fashion_test_labels.idx.gz")[:100]


def test_certificates_and_attacks_bracket_the_truth(fashion):
    network, model, images, labels = fashion
    epsilon = [1 / 255, 4 / 255]
    attacked = model.attack(images, labels, epsilon, baseline=network, queries=50)
    certified = model.certify(images, labels, epsilon)
    clean = np.mean(model.predict(images).argmax(1) == labels)
    assert attacked.clean_accuracy == pytest.approx(clean) and certified.clean_accuracy == pytest.approx(clean)
    for low, high in zip(certified.certified_accuracy, attacked.attacked_accuracy, strict=True):
        assert low <= high <= clean
    # No sample is both proved safe and fooled.
    assert not (certified.certified & attacked.fooled).any()
    assert attacked.fooled.shape == (100, 2) and attacked.attacked_accuracy[1] < clean
    assert {method for method, *_ in attacked.attacks} == {"fgsm", "pgd", "square"}
    rng = np.random.default_rng(0)
    for k, e in enumerate(epsilon):
        noise = np.clip(images / 255 + rng.choice([-e, e], size=images.shape), 0, 1) * 255
        right = model.predict(noise).argmax(1) == labels
        assert right[certified.certified[:, k]].all()


def test_the_report_shows_both(fashion):
    network, model, images, labels = fashion
    attack = model.attack(images, labels, [2 / 255], methods=["fgsm"])
    certify = model.certify(images, labels, [2 / 255])
    page = model.report(attack=attack, certify=certify).html
    assert "white-box attacks at 2.00/255" in page and "certified at 2.00/255" in page
    # A page without measurements leaves the card out.
    assert 'id="robustness"' in page and 'id="robustness"' not in model.report().html


def test_what_is_refused(fashion):
    _, model, images, labels = fashion
    with pytest.raises(simplicit.SettingError, match="bound"):
        model.certify(images, labels, bound="best")
    with pytest.raises(simplicit.SettingError, match="method"):
        model.attack(images, labels, methods=["cw"])
    with pytest.raises(simplicit.ShapeError, match="labels"):
        model.certify(images, labels[:5])
