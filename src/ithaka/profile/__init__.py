"""Where memory and time go: live bytes by holder, phase timers, traces, and the peak in words."""

from ithaka.profile.live import LiveBytes
from ithaka.profile.timeline import Phase, Timeline

__all__ = ["LiveBytes", "Phase", "Timeline"]
