"""From a plan to bytes on the drive: layout, copy steps, staging, resumption."""
