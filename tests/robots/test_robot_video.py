"""Videos of episodes, as GIF and MP4."""

import sys
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rollart.robots.episodes import RobotEpisode, RobotScore
from rollart.robots.video import save_video


def gif(*grays: int) -> bytes:
    frames = [Image.fromarray(np.full((64, 64, 3), gray, np.uint8)) for gray in grays]
    buffer = BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:], duration=80, loop=0)
    return buffer.getvalue()


def score(*episodes: tuple[bool, bytes]) -> RobotScore:
    played = [RobotEpisode(seed, success, 10, 1.0, video=video) for seed, (success, video) in enumerate(episodes)]
    return RobotScore(tuple(played))


def test_the_first_success_is_kept_and_without_the_extra_it_is_a_gif(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    lost, won = gif(0, 10), gif(0, 20)
    folder = tmp_path / "videos"
    assert save_video(score((False, lost), (True, won)), folder, "reach") == [folder / "reach.gif"]
    assert (folder / "reach.gif").read_bytes() == won


def test_without_a_film_nothing_is_written(tmp_path: Path) -> None:
    assert save_video(score((True, b"")), tmp_path / "videos", "reach") == []
    assert not (tmp_path / "videos").exists()


@pytest.mark.parametrize("grays", [(0, 60, 60, 60, 250), (60, 60)], ids=["a pause", "nothing moves"])
def test_a_pause_lasts_as_long_in_the_mp4(tmp_path: Path, grays: tuple[int, ...]) -> None:
    av = pytest.importorskip("av")
    _, mp4 = save_video(score((True, gif(*grays))), tmp_path, "reach")
    with av.open(str(mp4)) as file:
        shown = [(frame.time, frame.to_ndarray(format="rgb24").mean()) for frame in file.decode(video=0)]
    starts = {0.08 * number: gray for number, gray in enumerate(grays) if not number or gray != grays[number - 1]}
    assert [time for time, _ in shown] == pytest.approx(list(starts))
    assert [gray for _, gray in shown] == pytest.approx(list(starts.values()), abs=3)
