"""What would happen: schedules on devices and links under traces."""
