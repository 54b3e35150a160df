"""The version of this sealnet, told by --version and in every receipt."""

VERSION = "0.1.0"
