"""The ops of the domain `enginewright`: one file for each, with schema, reference and kernels."""

from enginewright.plugins.expand import expand_references
from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.plugin import DOMAIN, Plugin
from enginewright.plugins.registry import PLUGINS, binding_of, plugin_of

__all__ = ["DOMAIN", "PLUGINS", "KernelBinding", "Plugin", "binding_of", "expand_references", "plugin_of"]
