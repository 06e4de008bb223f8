"""Where memory and time go: live bytes by holder, phase timers, traces and progress."""
