"""bench --host: what the host pays for a decode step, on a device that takes no time."""
