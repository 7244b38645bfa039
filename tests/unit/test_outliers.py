"""The judgement of pseudo-gradient norms."""

import random

from pier_megatron.outer.outliers import OutlierDetector


def judge(detector: OutlierDetector, norm: float, fragment: int = 0) -> bool:
    """Judges a norm, and takes it into the history if it is no outlier."""
    found = detector.is_outlier(norm, fragment)
    if not found:
        detector.add(norm, fragment)
    return found


def test_only_what_is_far_above_the_history_is_an_outlier() -> None:
    chance, detector = random.Random(0), OutlierDetector(zscore=5)
    assert not any(judge(detector, chance.gauss(10, 1), fragment=0) for _ in range(300))
    assert judge(detector, 30.0, fragment=0)
    assert not judge(detector, 1.0, fragment=0)


def test_nothing_is_judged_before_there_is_a_history() -> None:
    detector = OutlierDetector(zscore=3)
    assert not any(judge(detector, norm, fragment=0) for norm in (1.0, 100.0, 1.0, 1.0, 50.0))


def test_outlier_does_not_become_the_norm() -> None:
    chance, detector = random.Random(1), OutlierDetector(zscore=5)
    for _ in range(50):
        judge(detector, chance.gauss(10, 1), fragment=0)
    assert all(judge(detector, 100.0, fragment=0) for _ in range(100))


def test_fragments_have_histories_of_their_own() -> None:
    chance, detector = random.Random(2), OutlierDetector(zscore=5)
    for _ in range(50):
        assert not judge(detector, chance.gauss(10, 1), fragment=0)
        assert not judge(detector, chance.gauss(1000, 10), fragment=1)
    assert judge(detector, 1000.0, fragment=0)


def test_state_comes_back() -> None:
    one, other = OutlierDetector(zscore=3), OutlierDetector(zscore=3)
    chance = random.Random(3)
    for _ in range(20):
        judge(one, chance.gauss(10, 1), fragment=0)
    other.load_state_dict(one.state_dict())
    assert [judge(one, norm, 0) for norm in (11.0, 20.0, 9.0)] == [judge(other, norm, 0) for norm in (11.0, 20.0, 9.0)]
    assert one.state_dict() == other.state_dict()
