"""The Python API of Beholder: ``from beholder import Beholder``."""

from preprocess.errors import BeholderError, ClientError, ServiceError
from preprocess.wire import ClipInfo, ImageInfo, Usage
from server.decision_models import Decision
from server.offline import Beholder
from server.offline_media import Clip
from server.options.option import SettingsError
from server.stages import Caption
from server.subtitles import Cue, srt, webvtt

__all__ = [
    "Beholder",
    "BeholderError",
    "Caption",
    "ClientError",
    "Clip",
    "ClipInfo",
    "Cue",
    "Decision",
    "ImageInfo",
    "ServiceError",
    "SettingsError",
    "Usage",
    "srt",
    "webvtt",
]
