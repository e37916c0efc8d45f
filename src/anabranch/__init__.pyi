"""Types of the public names, for type checkers and editors; `__init__.py` imports them at their first use."""

from anabranch.api.evaluation import evaluate as evaluate
from anabranch.api.model import TrainedModel as TrainedModel
from anabranch.api.model import export as export
from anabranch.api.model import generate as generate
from anabranch.api.model import load as load
from anabranch.api.publish import push as push
from anabranch.api.run import Metrics as Metrics
from anabranch.api.run import Run as Run
from anabranch.api.run import verify as verify
from anabranch.api.volunteer import join as join
from anabranch.config import RunConfig as RunConfig
from anabranch.errors import UserError as UserError
from anabranch.net.errors import NetError as NetError
from anabranch.node.local_swarm.local_swarm import LeaderFailed as LeaderFailed
from anabranch.train.model.registry import CausalModel as CausalModel
from anabranch.train.model.registry import register_model as register_model

__version__: str
PROTOCOL_VERSION: int
RUN_DIRECTORY_VERSION: int
