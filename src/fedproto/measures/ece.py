"""Expected calibration error."""

from __future__ import annotations

from fedproto.analysis.calibration import calibration_error
from fedproto.measures.base import MEASURES, Measure
from fedproto.types import ServerState


@MEASURES.register("ece")
class CalibrationMeasure(Measure):
    """Expected calibration error on the test parts of all clients, per pixel for label maps."""

    def take(self, state: ServerState) -> dict[str, float]:
        """Nothing where nobody has test samples."""
        test = self.probe.federation.test_indices
        return {"ece": calibration_error(self.probe.confidences(state, test))} if len(test) else {}
