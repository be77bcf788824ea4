"""The Python API of Beholder: ``from beholder import Beholder``."""

from preprocess.errors import BeholderError, ClientError, ServiceError
from preprocess.wire import ImageInfo, Usage
from server.decision_models import Decision
from server.offline import Beholder, Caption
from server.settings import SettingsError

__all__ = [
    "Beholder",
    "BeholderError",
    "Caption",
    "ClientError",
    "Decision",
    "ImageInfo",
    "ServiceError",
    "SettingsError",
    "Usage",
]
