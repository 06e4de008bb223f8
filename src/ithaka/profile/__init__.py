"""Where memory and time go: live bytes by category, phase timers, traces and progress."""
