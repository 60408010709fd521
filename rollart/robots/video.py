"""Videos of episodes: animated GIFs, and with the extra `mp4` the same frames as MP4."""

from fractions import Fraction
from io import BytesIO
from pathlib import Path

from PIL import Image, ImageSequence

from rollart.envs.adapters.continuous import FRAME_MS
from rollart.robots.episodes import RobotScore

_MILLISECOND = Fraction(1, 1000)


def save_video(score: RobotScore, folder: Path, name: str) -> list[Path]:
    """The first success, or the first episode; the files that were written, none if no episode was filmed."""
    filmed = sorted((one for one in score.played if one.video), key=lambda one: not one.success)
    if not filmed:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    gif, mp4 = folder / f"{name}.gif", folder / f"{name}.mp4"
    gif.write_bytes(filmed[0].video)
    return [gif, mp4] if _write_mp4(filmed[0].video, mp4) else [gif]


def _write_mp4(gif: bytes, path: Path) -> bool:
    """False without the extra."""
    try:
        import av
    except ImportError:
        return False
    with Image.open(BytesIO(gif)) as film, av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=Fraction(1000, FRAME_MS))
        stream.width, stream.height, stream.pix_fmt = *film.size, "yuv420p"
        elapsed = 0
        for image in ImageSequence.Iterator(film):
            frame = av.VideoFrame.from_image(image.convert("RGB"))
            frame.pts, frame.time_base = elapsed, _MILLISECOND  # equal frames are one in a GIF, which lasts longer
            elapsed += image.info.get("duration", FRAME_MS)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return True
