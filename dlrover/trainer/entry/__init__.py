"""Commands of TensorFlow jobs, under the names that manifests have."""
