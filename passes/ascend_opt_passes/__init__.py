"""The built-in passes, one file each, registered like any third party's."""
