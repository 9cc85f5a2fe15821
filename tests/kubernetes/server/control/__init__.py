"""What a control plane does around writes: admission, quotas, budgets, owners, namespaces."""
